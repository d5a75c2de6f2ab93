"""A launcher as a process of its own: starts the scripted run that its argument names, says `running`, and waits."""

import json
import sys
from dataclasses import replace

from bucket_grpo.bucket_sync.stores import open_store
from bucket_grpo.jobs.actions import signals_end
from bucket_grpo.jobs.hub import JobsHub
from bucket_grpo.jobs.launch import Launch, secrets_for
from tests.jobs.test_launch import _with_timeout, script_plan

state = json.loads(sys.argv[1])
plan = script_plan()
needs = plan.needs.model_copy(update={"run_name": state["run"], "jobs": _with_timeout(plan, "6s")})
plan = replace(plan, needs=needs, incarnation=state["incarnation"], mark=state["mark"])
hub = JobsHub("me")
launch = Launch(hub, open_store("hf://buckets/me/rl"), plan, secrets_for(plan, hub.token, {}), say=lambda _line: None)
with signals_end():
    launch.start({})
    launch.wait_running()
    print("running", flush=True)
    sys.exit(launch.wait())
