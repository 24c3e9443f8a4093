"""transformers + PEFT on the same workload: the other side of the comparison.

Run by path in an interpreter that has torch, transformers and peft (`--peer-python`); it imports
nothing of jlora. One JSON command per line on standard input, one JSON answer per line on
standard output, so that the driver can interleave it with jlora:

    load    directory, dtype, threads             -> versions
    probe   batch, cache, steps                   -> seconds of a prefill and of a decode step
    static  batch, cache, order                   -> seconds and tokens of the whole workload
    alone   prompt, tokens, adapter, how          -> seconds of a prefill and of a decode step
    gap     prompt, adapter, a, b                 -> difference of the logits of tokens a and b
"""

from __future__ import annotations

import json
import os
import platform
import sys
import time
import warnings
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import peft
import torch
import transformers
from peft import PeftModel
from transformers import AutoModelForCausalLM, DynamicCache, StoppingCriteria, StoppingCriteriaList

PAD = 0


class Clock(StoppingCriteria):
    """Notes when each token is out; stops nothing."""

    def __init__(self):
        self.times: list[float] = []

    def __call__(self, input_ids, scores, **_):
        self.times.append(time.perf_counter())
        return torch.zeros(len(input_ids), dtype=torch.bool)


class Peer:
    """The base model alone, and the same base under all adapters; greedy, no gradients."""

    def load(self, directory: str, dtype: str, threads: int) -> dict:
        torch.set_num_threads(threads)
        self.root = Path(directory)
        self.jobs = json.loads((self.root / "jobs.json").read_text())
        self.dtype = getattr(torch, dtype)
        self.base = self._base()
        self.lora = None
        for path in sorted((self.root / "adapters").iterdir()):
            if self.lora is None:
                self.lora = PeftModel.from_pretrained(self._base(), path, path.name, autocast_adapter_dtype=False)
            else:
                self.lora.load_adapter(path, path.name, autocast_adapter_dtype=False)
        self.lora = self.lora.to(self.dtype).eval()
        versions = {"torch": torch.__version__, "transformers": transformers.__version__, "peft": peft.__version__}
        return {"versions": {"python": platform.python_version(), **versions}, "threads": torch.get_num_threads()}

    def probe(self, batch: int, cache: str, steps: int) -> dict:
        """A batch from the middle of the workload in order of prompt length."""
        jobs = sorted(self.jobs, key=lambda job: len(job["prompt"]))
        at = max(0, (len(jobs) - batch) // 2)
        jobs = jobs[at : at + batch]
        clock = Clock()
        start = time.perf_counter()
        self._generate(jobs, cache, 1 + steps, stopping_criteria=StoppingCriteriaList([clock]))
        step = (clock.times[-1] - clock.times[0]) / steps
        return {"prefill_s": clock.times[0] - start, "step_s": step, "longest": self._longest(jobs)}

    def static(self, batch: int, cache: str, order: str) -> dict:
        """Everything in static batches; a batch runs until its longest output is done."""
        lengths = {"prompt": lambda job: len(job["prompt"]), "output": lambda job: job["max_tokens"]}
        jobs = sorted(self.jobs, key=lengths[order])
        tokens: dict[int, list[int]] = {}
        start = time.perf_counter()
        for i in range(0, len(jobs), batch):
            part = jobs[i : i + batch]
            _, output = self._generate(part, cache, max(job["max_tokens"] for job in part))
            for job, row in zip(part, output.tolist(), strict=True):
                tokens[job["id"]] = row[: job["max_tokens"]]
        return {"seconds": time.perf_counter() - start, "tokens": tokens}

    def alone(self, prompt: list[int], tokens: int, adapter: str | None, how: str) -> dict:
        """One request: through `generate`, or in a bare loop over the model with its cache."""
        run = self._loop if how == "loop" else self._plain_generate
        start = time.perf_counter()
        times = run(self._model(adapter), torch.tensor([prompt]), 1 + tokens)
        return {"prefill_s": times[0] - start, "step_s": (times[-1] - times[0]) / tokens}

    def gap(self, prompt: list[int], adapter: str | None, a: int, b: int) -> dict:
        scores = torch.log_softmax(self._model(adapter)(torch.tensor([prompt])).logits[0, -1].float(), -1)
        return {"gap": float(abs(scores[a] - scores[b]))}

    def _base(self):
        return AutoModelForCausalLM.from_pretrained(self.root / "model", dtype=self.dtype).eval()

    def _model(self, adapter: str | None):
        if adapter is None:
            return self.base
        self.lora.set_adapter(adapter)
        return self.lora

    def _generate(self, jobs: list[dict], cache: str, new_tokens: int, **extra):
        longest = self._longest(jobs)
        ids = torch.full((len(jobs), longest), PAD)
        mask = torch.zeros_like(ids)
        for row, job in enumerate(jobs):  # left padding
            ids[row, longest - len(job["prompt"]) :] = torch.tensor(job["prompt"])
            mask[row, longest - len(job["prompt"]) :] = 1
        names = [job["adapter"] or "__base__" for job in jobs]
        start = time.perf_counter()
        settings = {**self._settings(new_tokens, cache), **extra}
        out = self.lora.generate(input_ids=ids, attention_mask=mask, adapter_names=names, **settings)
        return time.perf_counter() - start, out[:, longest:]

    def _plain_generate(self, model, ids: torch.Tensor, new_tokens: int) -> list[float]:
        clock = Clock()
        settings = self._settings(new_tokens, "dynamic")
        stopping = StoppingCriteriaList([clock])
        model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), stopping_criteria=stopping, **settings)
        return clock.times

    def _loop(self, model, ids: torch.Tensor, new_tokens: int) -> list[float]:
        cache = DynamicCache()
        times = []
        for _ in range(new_tokens):
            logits = model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
            ids = logits[:, -1].argmax(-1, keepdim=True)
            int(ids)  # a user would read it
            times.append(time.perf_counter())
        return times

    @staticmethod
    def _settings(new_tokens: int, cache: str) -> dict:
        settings = {"do_sample": False, "pad_token_id": PAD, "eos_token_id": None, "disable_compile": True}
        if cache == "static":
            settings["cache_implementation"] = "static"
        return {**settings, "max_new_tokens": new_tokens, "use_cache": True}

    @staticmethod
    def _longest(jobs: list[dict]) -> int:
        return max(len(job["prompt"]) for job in jobs)


def main() -> None:
    """Answers commands until standard input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a library prints goes to standard error
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    peer = Peer()
    with torch.inference_mode():
        for line in sys.stdin:
            command = json.loads(line)
            op = command.pop("op")
            if op not in ("load", "probe", "static", "alone", "gap"):
                raise SystemExit(f"peer: unknown command {op!r}")
            answers.write(json.dumps(getattr(peer, op)(**command)) + "\n")
            answers.flush()


if __name__ == "__main__":
    main()
