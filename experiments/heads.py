"""What a vocabulary head takes: milliseconds of finding the likeliest tokens of a few hidden states."""

from __future__ import annotations

import time
from statistics import median
from typing import Any

import numpy as np

from experiments.models import ModelWork, prompts_of
from experiments.tasks import NotAvailable, Outcome, Task

REPEATS = 30


class HeadSeconds(ModelWork):
    """Parameters: `head` (a vocabulary like "fr:16384"), `rows` (hidden states per call), `domains`.

    The target's own head stands for a drafter's: the rows of the matrix decide the time and not what is in them. Timed
    in turns with the full head, so that both meet the same machine.
    """

    def run(self, task: Task) -> Outcome:
        """One row per number of hidden states."""
        import torch

        from adaptspec.vocab import make_head

        weight = self.network.get_output_embeddings().weight
        vocabulary = self.network.config.get_text_config().vocab_size
        ids = self.conversation.encode(prompts_of(self.settings, task.parameter("domains"))[0].turns[:1])
        heads = {}
        try:
            for name in dict.fromkeys(("full", task.parameter("head"))):
                heads[name] = make_head(name)
                heads[name].bind(weight, vocab_size=vocabulary)
        except (ValueError, FileNotFoundError, ImportError) as error:
            raise NotAvailable(str(error)) from error
        tokens = np.array(ids, dtype=np.int64)
        for head in heads.values():
            count = head.needs_prompt_top_k
            head.prefill(tokens, self._top_tokens(ids, count) if count else None)
        rows = []
        generator = torch.Generator().manual_seed(task.configuration.seed)
        for states in task.parameter("rows", (1, 8)):
            hidden = torch.randn(states, weight.shape[1], generator=generator).to(weight)
            times: dict[str, list[float]] = {name: [] for name in heads}
            for turn in range(REPEATS + 3):
                for name, head in heads.items():
                    seconds = self._timed(head, hidden)
                    if turn >= 3:
                        times[name].append(seconds)
            name = task.parameter("head")
            rows.append(
                {
                    "head": name,
                    "hidden_states": states,
                    "head_rows": heads[name].rows,
                    "head_milliseconds": 1000.0 * median(times[name]),
                    "full_milliseconds": 1000.0 * median(times["full"]),
                    "seed": task.configuration.seed,
                }
            )
        return Outcome(rows=rows, facts=self.facts)

    def _timed(self, head: Any, hidden: Any) -> float:
        import torch

        with torch.inference_mode():
            self._wait()
            begun = time.perf_counter()
            head.top(hidden, k=8, depth=1)
            self._wait()
            return time.perf_counter() - begun

    def _wait(self) -> None:
        import torch

        if self.network.device.type == "cuda":
            torch.cuda.synchronize(self.network.device)

    def _top_tokens(self, ids: list[int], count: int) -> np.ndarray:
        """int64 [T - 1, count], the target's likeliest tokens after every token of the prompt but the last."""
        import torch

        with torch.inference_mode():
            logits = self.network(torch.tensor([ids], device=self.network.device), use_cache=False).logits[0, :-1]
        return logits.float().topk(count).indices.cpu().numpy()
