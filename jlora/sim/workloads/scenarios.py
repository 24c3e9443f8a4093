"""The workloads W1 to W8, each from public files or from their shape alone.

Without the files, lengths are lognormal with the files' means and deviations of natural logarithms.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from jlora.sim.workloads import files
from jlora.sim.workloads.arrivals import Recorded, gamma, typical_clients
from jlora.sim.workloads.files import Lengths, Step
from jlora.sim.workloads.load import Exchange, Source
from jlora.sim.workloads.popularity import by_client, drift, power, recent, zipf

Random = np.random.Generator

SERVICE_PROMPT = 256  # tokens at the start of all dialogs of one service
INSTRUCTION = 64  # tokens at the start of all translations into one language
MOONCAKE_PROMPT = 512  # tokens of the block that nearly all prompts of that trace share
TOOL_TOKENS = (30, 150)  # tokens of a tool's result, part of the question
LANGUAGES = 36
CHECKERS = 3  # adapters of a pipeline
INVOCATION = 4  # tokens that invoke a checker
VERDICT = (10, 50)
PIPELINE_STEPS = 4.0  # the base twice, and two checkers on average


def chat(data: Path | None = None) -> Source:
    """W1, a chatbot: Topical-Chat's questions, Azure conv's answers and clock. One adapter per session.

    Stands in for LMSYS-33k (FASTLIBRA 6.2). Gaps are lognormal with sigma 1 around Mooncake's median of
    123 s: most users answer soon, some late.
    """
    if data is None:

        def dialog(rng: Random, group: int) -> list[Exchange]:
            turns = max(1, round(rng.normal(10.5, 0.7)))
            steps = [Step(_words(rng, 2.84, 0.59), _lognormal(rng, 5.02, 0.86, 1000)) for _ in range(turns)]
            return _talk(steps, _soon(rng))

        return Source("W1 synthetic", dialog, gamma(1.09), zipf(0.9), 10.5, 200.0)
    talks, requests = files.topical(data), files.azure(data)

    def real(rng: Random, group: int) -> list[Exchange]:
        asked = talks[rng.integers(len(talks))]
        told = requests.outputs[rng.integers(len(requests.outputs), size=len(asked))].tolist()
        return _talk([Step(step.asked, answer) for step, answer in zip(asked, told, strict=True)], _soon(rng))

    return Source("W1", real, Recorded(requests.times), zipf(0.9), _mean(talks), 200.0)


def long_chat(data: Path | None = None) -> Source:
    """W1b, long conversations below one common block: Mooncake's sessions, gaps and clock."""
    if data is None:

        def dialog(rng: Random, group: int) -> list[Exchange]:
            first = max(_lognormal(rng, 8.77, 1.2, 130_000) - MOONCAKE_PROMPT, 1)
            asked = [first, *(_lognormal(rng, 4.48, 2.45, 16_000) for _ in range(rng.geometric(0.72) - 1))]
            return _talk([Step(a, _lognormal(rng, 5.34, 1.37, 2000)) for a in asked], _soon(rng))

        return Source("W1b synthetic", dialog, gamma(1.0), zipf(0.9), 1.39, 200.0, MOONCAKE_PROMPT)
    starts, sessions = files.mooncake(data)
    gap_s = _mean_gap(sessions)

    def real(rng: Random, group: int) -> list[Exchange]:
        first, *others = sessions[rng.integers(len(sessions))]
        head = Exchange(max(first.asked - MOONCAKE_PROMPT, 1), first.told)
        return [head, *(Exchange(step.asked, step.told, step.gap_s / gap_s) for step in others)]

    return Source("W1b", real, Recorded(starts), zipf(0.9), _mean(sessions), gap_s, MOONCAKE_PROMPT)


def translation(data: Path | None = None) -> Source:
    """W2: two to five Tatoeba sentences after an instruction, one adapter per language, ServeGen's clients.

    Stands in for OPUS-100 and the Azure Functions trace. With more adapters than languages, languages repeat.
    """
    if data is None:

        def dialog(rng: Random, group: int) -> list[Exchange]:
            asked = sum(_lognormal(rng, 2.06, 0.43, 60) for _ in range(rng.integers(2, 6)))
            return [Exchange(asked, asked * max(rng.normal(1.4, 0.5), 0.5))]

        return Source("W2 synthetic", dialog, typical_clients(LANGUAGES), by_client, prompt=INSTRUCTION)
    languages = list(files.tatoeba(data).values())

    def real(rng: Random, group: int) -> list[Exchange]:
        pairs = languages[group % len(languages)]
        chosen = [pairs[i] for i in rng.integers(len(pairs), size=rng.integers(2, 6))]
        return [Exchange(sum(asked for asked, _ in chosen), sum(told for _, told in chosen))]

    return Source("W2", real, files.clients(data, "m-small"), by_client, prompt=INSTRUCTION)


def agents(data: Path | None = None) -> Source:
    """W3, personal agents: dialogs of SGD (26 services) and Taskmaster-4 after a prompt per service.

    Stands in for Taskmaster-1 and -2 with the Azure Functions trace. SGD has no tool results, so each
    question has 30 to 150 additional tokens. With more adapters than services, services repeat.
    """
    name = "W3" if data else "W3 synthetic"
    arrivals = files.clients(data, "m-small") if data else typical_clients(34)
    dialog, turns = _services(data)

    def timed(rng: Random, group: int) -> list[Exchange]:
        return _talk(dialog(rng, group), lambda: rng.exponential(1.0))

    return Source(name, timed, arrivals, zipf(0.9), turns, 8.0, SERVICE_PROMPT)


def tenants(data: Path | None = None) -> Source:
    """W4, many tenants: Azure conv's lengths, an adapter per client of ServeGen m-mid (like MAF1 in dLoRA)."""
    arrivals = files.clients(data, "m-mid") if data else typical_clients(92)
    return Source("W4" if data else "W4 synthetic", _single(data), arrivals, by_client)


def recorded_tenants(data: Path | None = None) -> Source:
    """W4b: Azure conv's lengths, adapters and clock of GenTD26, much faster (like MAF2)."""
    if data is None:
        return Source("W4b synthetic", _single(None), gamma(8.0), recent())
    return Source("W4b", _single(data), files.lora_clock(data), by_client)


def shifting(data: Path | None = None) -> Source:
    """W5: Azure conv; the popular adapters change every 5 minutes (LoRAServe's shifting skew, GenTD26's drift)."""
    arrivals = Recorded(files.azure(data).times) if data else gamma(1.09)
    return Source("W5" if data else "W5 synthetic", _single(data), arrivals, drift(300.0, 1.0, keep=2))


def pipelines(data: Path | None = None, activated: bool = False) -> Source:
    """W6: the base answers each question, one to three checkers read the answer, the base concludes.

    The pipeline of activated LoRA's evaluation, on the dialogs of W3. A checker is an aside that adds a
    few tokens and answers with 10 to 50. An adapter group is a pipeline of three checkers. With `activated`
    (W6a) they are activated LoRAs, each invoked by its few tokens.
    """
    dialog, turns = _services(data)

    def piped(rng: Random, group: int) -> list[Exchange]:
        exchanges: list[Exchange] = []
        for index, step in enumerate(dialog(rng, group)):
            gap = rng.exponential(1.0) * PIPELINE_STEPS if index else 0.0
            exchanges.append(Exchange(step.asked, step.told, gap, role=None))
            roles = rng.permutation(CHECKERS)[: rng.integers(1, CHECKERS + 1)].tolist()
            verdicts = rng.uniform(*VERDICT, len(roles))
            check = partial(Exchange, INVOCATION, aside=True, activated=activated)
            exchanges += [check(told, role=role) for role, told in zip(roles, verdicts, strict=True)]
            exchanges.append(Exchange(float(verdicts.sum()), step.told, role=None))
        return exchanges

    arrivals = files.clients(data, "m-small") if data else typical_clients(34)
    name = ("W6a" if activated else "W6") + ("" if data else " synthetic")
    turns = turns * PIPELINE_STEPS
    return Source(name, piped, arrivals, zipf(0.9), turns, 8.0 / PIPELINE_STEPS, SERVICE_PROMPT, CHECKERS)


def synthetic(data: Path | None = None) -> Source:
    """W7: lengths uniform in [8, 512), Gamma arrivals, power-law adapters (S-LoRA Sec. 7). Needs no files.

    S-LoRA's and Punica's other settings: `Load.arrivals` gamma(2), gamma(4), ...; `Load.popularity`
    power(0.1), ..., identical, distinct, uniform, geometric.
    """

    def dialog(rng: Random, group: int) -> list[Exchange]:
        asked, told = rng.integers(8, 512, 2).tolist()
        return [Exchange(asked, told)]

    return Source("W7", dialog, gamma(1.0), power(0.3))


def coding(data: Path | None = None) -> Source:
    """W8, coding agents: long growing contexts, with think times between an answer and the next request.

    An adapter per session and a second one for its sub-agents, which have separate contexts.
    """
    if data is None:

        def dialog(rng: Random, group: int) -> list[Exchange]:
            turns = min(150, 5 + int(rng.exponential(32.0)))
            first, later = _lognormal(rng, 8.56, 1.6, 100_000), partial(_lognormal, rng, 5.0, 1.8, 20_000)
            steps = [Step(a, _lognormal(rng, 5.5, 0.91, 8000)) for a in (first, *(later() for _ in range(turns - 1)))]
            return _talk(steps, lambda: float(rng.lognormal(-1.385, 1.664)))

        return Source("W8 synthetic", dialog, gamma(1.0), zipf(0.9), 36.7, 65.0, 14_900, 2, thinks=True)
    prompt, sessions = files.coding_sessions(data)
    gap_s = _mean_gap(sessions)

    def real(rng: Random, group: int) -> list[Exchange]:
        first, *others = sessions[rng.integers(len(sessions))]
        return [
            Exchange(first.asked, first.told),
            *(Exchange(s.asked, s.told, s.gap_s / gap_s, min(s.agent, 1), s.agent) for s in others),
        ]

    return Source("W8", real, gamma(1.0), zipf(0.9), _mean(sessions), gap_s, prompt, 2, thinks=True)


def _services(data: Path | None) -> tuple[Callable[[Random, int], Sequence[Step]], float]:
    """Dialogs of a service, with tool results in the questions, and their mean turns."""
    if data is None:

        def drawn(rng: Random, group: int) -> list[Step]:
            turns = max(1, round(rng.normal(8.9, 2.7)))
            tools = rng.uniform(*TOOL_TOKENS, turns).tolist()
            return [Step(_words(rng, 1.91, 0.62) + tool, _words(rng, 2.21, 0.63)) for tool in tools]

        return drawn, 8.9
    services = list(files.sgd(data).values())
    orders = files.taskmaster(data)

    def real(rng: Random, group: int) -> Sequence[Step]:
        service = group % (len(services) + 1)
        if service == len(services):
            return orders[rng.integers(len(orders))]
        talk = services[service][rng.integers(len(services[service]))]
        return [Step(step.asked + rng.uniform(*TOOL_TOKENS), step.told) for step in talk]

    means = [_mean(talks) for talks in (*services, orders)]
    return real, sum(means) / len(means)


def _single(data: Path | None) -> Callable[[Random, int], list[Exchange]]:
    """Dialogs of one request, with Azure conv's lengths."""
    if data is None:
        return lambda rng, group: [Exchange(_lognormal(rng, 6.63, 0.99, 14_000), _lognormal(rng, 5.02, 0.86, 1000))]
    requests: Lengths = files.azure(data)

    def real(rng: Random, group: int) -> list[Exchange]:
        chosen = rng.integers(len(requests.prompts))
        return [Exchange(float(requests.prompts[chosen]), float(requests.outputs[chosen]))]

    return real


def _talk(steps: Sequence[Step], gap: Callable[[], float]) -> list[Exchange]:
    return [Exchange(step.asked, step.told, gap() if index else 0.0) for index, step in enumerate(steps)]


def _soon(rng: Random) -> Callable[[], float]:
    return lambda: float(rng.lognormal(-0.5, 1.0))


def _words(rng: Random, mean: float, spread: float) -> float:
    return _lognormal(rng, mean, spread, 90) * files.TOKENS_PER_WORD


def _lognormal(rng: Random, mean: float, spread: float, most: float) -> float:
    return min(float(rng.lognormal(mean, spread)), most)


def _mean(sessions: Sequence[Sequence[Step]]) -> float:
    return sum(map(len, sessions)) / len(sessions)


def _mean_gap(sessions: Sequence[Sequence[Step]]) -> float:
    gaps = [step.gap_s for session in sessions for step in session[1:]]
    return max(sum(gaps) / max(len(gaps), 1), 1e-3)
