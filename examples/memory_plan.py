"""Where the memory of a model goes, before anything of it is loaded."""

from __future__ import annotations

import argparse

from mistral_paged import MistralPagedError, Runner, Which
from mistral_paged.default_model import default_model

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--config", help="folder with a config.json: how many requests of its length does a card of --card MB take?")
parser.add_argument("--card", type=int, default=24 * 1024, help="megabytes, of which 5 %% are left to the driver")
options = parser.parse_args()

if options.config:
    which, card = Which.Plain(options.config), [options.card]
    plan = Runner.memory_plan(which, pa_gpu_mem_usage=0.95, devices=card)
    fit = plan.num_requests_that_fit(plan.max_model_len)
    print(plan, f"{fit} requests of {plan.max_model_len} tokens fit", sep="\n")
    try:  # The same question as a promise: one more than fit is refused, with what would fit.
        Runner.memory_plan(which, max_seqs=fit + 1, guaranteed=True, pa_gpu_mem_usage=0.95, devices=card)
    except MistralPagedError as error:
        print(error)
else:
    print(Runner.memory_plan(Which.GGUF(str(default_model())), pa_ctxt_len=4096, max_seqs=4, guaranteed=True))
