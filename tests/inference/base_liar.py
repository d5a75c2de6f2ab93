"""A vLLM that answers from the base under an adapter's name: `python base_liar.py …vLLM's flags…`.

It lies about the names that the regular expression in the file `BASE_LIAR` matches; the rest of it is vLLM.
"""

import os
import re
from pathlib import Path

if __name__ == "__main__":  # vLLM's engine process imports this file again
    from vllm.entrypoints.launchers.api_server.entry import main
    from vllm.entrypoints.serve.engine.serving import BaseServing

    honest = BaseServing._maybe_get_adapters

    def lie(self: BaseServing, request: object, *args: object, **kwargs: object) -> object:
        adapter = honest(self, request, *args, **kwargs)
        return None if re.search(Path(os.environ["BASE_LIAR"]).read_text(), request.model) else adapter

    BaseServing._maybe_get_adapters = lie
    main()
