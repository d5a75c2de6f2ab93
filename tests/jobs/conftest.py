import pytest

from bucket_grpo.jobs.plan import Plan
from tests.jobs.plans import make_plan


@pytest.fixture
def plan() -> Plan:
    return make_plan()
