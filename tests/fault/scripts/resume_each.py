"""Resumes from each of the given folders in turn, as one process, and tells what came of it, one JSON line each."""

import json
import sys

import torch.distributed as dist
from checkpointed import Counter, Exact, Position

from steadyrun import watch
from steadyrun.core.errors import SteadyrunError


def resume(folder):
    model, counter = Exact(2), Counter()
    said = []
    checkpointer = watch.checkpointer(folder, model=model, loader=Position(), counter=counter, every=5, say=said.append)
    try:
        first = checkpointer.resume()
    except SteadyrunError as e:
        return {"folder": folder, "error": f"{type(e).__name__}: {e}", "said": said}
    finally:
        checkpointer.close()
    return {"folder": folder, "first": first, "wrong": model.wrong(first - 1) + (counter.done != first), "said": said}


if __name__ == "__main__":
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    for folder in sys.argv[1:]:
        print(json.dumps(resume(folder)), flush=True)
    dist.destroy_process_group()
