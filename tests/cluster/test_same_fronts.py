"""A client cannot tell one replica from two: the fronts' own tests, over a router.

Left out are tests of one engine's insides (blocks, its queue's length) and those that make a server of their own.
"""
# ruff: noqa: F401, F811  (the tests are what is imported)

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from jlora.replica import Replica
from tests.cluster._real import Seat, cluster
from tests.serve._server import Served
from tests.serve.conftest import ADAPTERS
from tests.serve.http.conftest import client, http
from tests.serve.http.test_openai import (
    test_a_chat_is_grpcs_answer_whole_and_streamed,
    test_a_completion_is_grpcs_answer,
    test_a_stream_says_what_the_whole_answer_says,
    test_async_clients_share_the_batch,
    test_echo_begins_with_the_prompt_and_its_logprobs,
    test_models_list_the_base_and_every_adapter,
    test_parts_of_text_are_a_text,
    test_prompt_logprobs_have_vllms_form,
    test_prompts_of_every_kind,
    test_sampling_fields_reach_the_engine_by_vllms_names,
)
from tests.serve.http.test_streams import (
    test_a_client_that_leaves_aborts_its_request,
    test_events_on_the_wire,
    test_one_client_of_many_leaves_and_nobody_else_notices,
    test_the_first_token_comes_at_once,
)
from tests.serve.test_grpc import (
    test_a_live_request_id_cannot_be_used_twice,
    test_abort_ends_with_what_there_is,
    test_each_tenant_has_its_own_request_ids,
    test_end_and_stop_tokens,
    test_logprobs_cover_every_token_when_asked,
    test_models_answer_together_as_they_do_alone,
    test_one_completion_stops_and_the_others_go_on,
    test_stop_string_across_tokens_ends_the_text,
    test_stream_and_unary_say_the_same,
    test_text_chat_and_token_ids_are_three_ways_to_one_prompt,
    test_unknown_model_lists_near_names,
    test_unset_temperature_samples_and_zero_is_greedy,
    test_usage_and_timing_are_on_the_last_message_only,
)


@dataclass
class Routed(Served):
    """The fronts over a router of these replicas."""

    seats: Sequence[Seat] = ()

    def check_integrity(self) -> None:
        for seat in self.seats:
            seat.engine.check_integrity().result(20)

    @property
    def replica(self) -> Replica:  # pyright: ignore[reportIncompatibleMethodOverride]
        """The router."""
        return self.backend.loaded


@pytest.fixture(scope="module")
def served(text_model: Path) -> Iterator[Served]:
    paths = {name: str(text_model.parent / "adapters" / name) for name in ADAPTERS}
    with cluster(text_model, paths, alone=False) as made:
        one = made.served
        routed = Routed(one.backend, one.channel, one.address, one.http, made.seats)
        yield routed
        routed.check_idle()
