"""Results of runs whose every number is known: a drafter that is always right, and one that never is."""

import pytest

from compressed_spec.decode import Decoder, Request
from compressed_spec.generate import make_requests, prepare_decoder
from compressed_spec.measure.load import Load, Run
from compressed_spec.measure.quality import Judgement
from compressed_spec.measure.record import RequestRecord
from compressed_spec.measure.summary import acceptance, latency, quality, request_record, throughput
from compressed_spec.sampling_params import SamplingParams
from compressed_spec.testing import MarkovModel, cycle, mixed_table

TOKENS = 81  # one of the prefill, and 20 rounds of 4
JUDGEMENT = Judgement(correct=True, well_formed=None, looping=False)


class Second:
    """A clock that gains a second whenever it is read, from 0 on."""

    def __init__(self) -> None:
        self.now = -1.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


def ran(model: MarkovModel, count: int) -> tuple[Decoder, Run, list[RequestRecord]]:
    """`count` requests, one at a time, with chains of three drafts."""
    requests: list[Request] = make_requests(
        model, [[1, 2]] * count, SamplingParams(), max_new_tokens=TOKENS, stop_token_ids=[]
    )
    decoder = prepare_decoder(model, requests, tree="s3_k1_d4", drafter="mtp", verifier="auto", batch_size=1)
    found = Load(decoder, requests, concurrency=1, clock=Second()).run()
    records = [
        request_record(i, str(i), None, 2, timeline, decoder.stats[i], JUDGEMENT)
        for i, timeline in enumerate(found.timelines)
    ]
    return decoder, found, records


def test_a_drafter_that_is_always_right() -> None:
    decoder, found, records = ran(MarkovModel(cycle(16), cycle(16)), 2)
    one = acceptance(decoder, found.timelines, records)
    assert (one.num_rounds, one.num_draft_tokens, one.num_accepted_tokens) == (40, 120, 120)
    assert one.acceptance_length == one.mean_request_acceptance_length == 4.0
    assert one.draft_acceptance_rate == 1.0
    assert one.candidates_per_round == 3.0
    assert one.num_accepted_tokens_per_pos == (40, 40, 40)
    assert one.acceptance_rate_per_pos == one.conditional_acceptance_rate_per_pos == (1.0, 1.0, 1.0)
    assert one.accepted_histogram == (0, 0, 0, 40)
    # Rounds begin at tokens 1, 5, ..., 77 of each text, and the last one ends it.
    assert [(b.start, b.num_rounds, b.num_tokens) for b in one.by_output_position] == [
        (0, 16, 64),
        (32, 16, 64),
        (64, 6, 24),
    ]
    # The clock is read before and after each step: a request's 21 steps end at its arrival + 1, 3, ..., 41.
    spread = latency(found.timelines, records)
    assert spread.mean_ttft_ms == spread.p99_ttft_ms == 1000.0
    assert spread.mean_itl_ms == spread.median_itl_ms == 2000.0
    assert spread.mean_tpot_ms == pytest.approx(40000 / 80)
    assert (spread.mean_e2el_ms, spread.std_e2el_ms) == (41000.0, 0.0)
    through = throughput(found, records)
    assert through.duration == 84.0
    assert through.output_throughput == 2 * TOKENS / 84
    assert through.decode_throughput == 160 / 80
    assert through.mean_concurrency == pytest.approx(82 / 84)
    assert quality(records).completion_rate == 0.0
    assert quality(records).accuracy == 1.0
    assert quality(records).format_rate is None


def test_a_drafter_that_is_never_right() -> None:
    right = cycle(16)
    with pytest.warns(UserWarning, match="None of"):
        decoder, found, records = ran(MarkovModel(right, mixed_table(right, range(16))), 1)
    one = acceptance(decoder, found.timelines, records)
    assert one.num_rounds == TOKENS - 1
    assert one.acceptance_length == 1.0
    assert one.draft_acceptance_rate == 0.0
    assert one.num_accepted_tokens_per_pos == ()
    assert one.accepted_histogram == (TOKENS - 1,)
    assert one.candidates_per_round < 3.0  # before the end there is no room for three


def test_depths_are_unconditional_and_conditional() -> None:
    """The head errs after token 5 alone, so of 16 places in the cycle those up to three before it accept fewer."""
    right = cycle(16)
    decoder, found, records = ran(MarkovModel(right, mixed_table(right, [5])), 1)
    one = acceptance(decoder, found.timelines, records)
    text = [3 + i for i in range(TOKENS)]  # after the prompt 1, 2; modulo 16
    place, depths, rounds = 0, [0, 0, 0], 0
    while place < TOKENS - 1:
        accepted = 0
        while accepted < min(3, TOKENS - 2 - place) and text[place + accepted] % 16 != 5:
            depths[accepted] += 1
            accepted += 1
        place += accepted + 1
        rounds += 1
    assert one.num_rounds == rounds
    assert one.num_accepted_tokens_per_pos == tuple(depths)
    assert one.acceptance_rate_per_pos == tuple(count / rounds for count in depths)
    assert one.conditional_acceptance_rate_per_pos == (
        depths[0] / rounds,
        depths[1] / depths[0],
        depths[2] / depths[1],
    )
