"""Naive against paged KV memory: how many real conversations one budget runs at once. See docs/tutorial.md."""

import argparse

from mistral_paged import Which
from mistral_paged.default_model import default_model
from mistral_paged.memory import MODES, describe, describe_shortage, run

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("mode", choices=MODES, nargs="?", default="paged")
parser.add_argument("requests", type=int, nargs="?", default=4)
parser.add_argument("--kv-mb", type=int, default=1024)
options = parser.parse_args()

report = run(options.mode, options.requests, Which.GGUF(str(default_model())), kv_mb=options.kv_mb)
print(describe(report))
if report.out_of_memory:
    print(describe_shortage(report))
