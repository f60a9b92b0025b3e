"""The page: its words and tables around the pictures."""

from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

from jinja2 import Environment

from compressed_spec.measure.bootstrap import Interval
from compressed_spec.measure.compare import Comparison
from compressed_spec.measure.record import ACCEPTANCE_DEFINITION, SweepRecord
from compressed_spec.measure.reporting import charts
from compressed_spec.measure.reporting.lanes import LENGTH, SPEED, Lane
from compressed_spec.measure.reporting.recommend import Advice, Verdict
from compressed_spec.measure.reporting.theme import DARK, LIGHT

_MOST_FAILURES = 20


def comparison_table(lane: Lane) -> str:
    """Chains against trees, as an HTML table; empty without any."""
    import pandas

    lines = []
    for batch_size, budget, by_measure in charts.comparison_rows(lane, lane.trees):
        length, speed = by_measure.get(LENGTH), by_measure.get(SPEED)
        one = speed or length
        assert one is not None
        lines.append(
            {
                "batch": batch_size,
                "D": budget.removeprefix("D "),
                "chain": one.first,
                "tree": one.second,
                "tokens a round": _marked(length),
                "tokens/s": _marked(speed),
            }
        )
    return pandas.DataFrame(lines).to_html(index=False, border=0) if lines else ""


def _marked(one: Comparison | None) -> str:
    return "" if one is None else _gain(one.gain) + (" ~" if one.overlap else "")


def _gain(gain: Interval) -> str:
    return f"{gain.estimate:+.1%} ({gain.low:+.1%} to {gain.high:+.1%})"


def render_page(
    records: Sequence[SweepRecord], advices: Sequence[Advice], sections: Sequence[dict[str, object]]
) -> str:
    """The whole page. sections: what the template shows of each lane."""
    template = files("compressed_spec").joinpath("assets/report/page.html").read_text(encoding="utf-8")
    setup, machine = records[0].setup, records[0].environment
    page: str = (
        Environment(autoescape=True)
        .from_string(template)
        .render(
            title=f"Speculative decoding of {Path(setup.model).name}",
            subtitle=f"{machine.device_name}; {', '.join(sorted({record.dataset for record in records}))}; "
            f"{len(records)} points, {min(record.started_at for record in records)[:10]}",
            advices=[{"sentence": one.sentence, "rows": [_verdict_row(v) for v in one.verdicts]} for one in advices],
            caveats=_caveats(records, advices),
            lanes=sections,
            failures=_failures(records),
            conditions=_conditions(records),
            definition=ACCEPTANCE_DEFINITION[0].upper() + ACCEPTANCE_DEFINITION[1:],
            light=LIGHT,
            dark=DARK,
        )
    )
    return page


def _verdict_row(verdict: Verdict) -> dict[str, str]:
    gain, mode = "" if verdict.gain is None else _gain(verdict.gain), verdict.mode
    if gain and (mode is None or mode.is_off):
        gain += ", the fastest other"
    use = "-" if mode is None else mode.tree
    return {"batch": str(verdict.batch_size), "use": use, "gain": gain, "why": verdict.reason.value}


def _caveats(records: Sequence[SweepRecord], advices: Sequence[Advice]) -> list[str]:
    setup = records[0].setup
    caveats = [
        f"Of {setup.model} on this machine, {setup.num_requests} requests a point of at most {setup.max_new_tokens} "
        "tokens; other models, machines and texts need a sweep of their own."
    ]
    if any(advice.single_repeat for advice in advices):
        caveats.append(
            "Measured once: the machine's ups and downs are not in the intervals of tokens/s; use --repeats."
        )
    if len({record.dataset for record in records}) > 1:
        caveats.append("All datasets together; each has its own section below.")
    return caveats


def _failures(records: Sequence[SweepRecord]) -> list[str]:
    found = []
    for record in records:
        where = f"{record.dataset}, {record.tree}, batch {record.batch_size}, repeat {record.repeat}"
        if record.error is not None:
            found.append(f"{where}: {record.error}")
        for one in () if record.results is None else record.results.requests:
            if one.error is not None:
                found.append(f"{where}, request {one.index}: {one.error}")
    more = len(found) - _MOST_FAILURES
    return [*found[:_MOST_FAILURES], f"and {more} more"] if more > 0 else found


def _conditions(records: Sequence[SweepRecord]) -> list[tuple[str, str]]:
    setup, machine = records[0].setup, records[0].environment
    commands = dict.fromkeys(" ".join(record.environment.argv) for record in records)
    return [
        ("model", f"{setup.model} ({setup.checkpoint_hash}), tokenizer {setup.tokenizer_hash}"),
        ("weights and numbers", f"stored {', '.join(setup.weights)}; run in {setup.dtype}, {setup.numerics} numerics"),
        (
            "machine",
            f"{machine.device_name}, {machine.num_threads} threads of {machine.num_cores} cores; {machine.platform}",
        ),
        ("versions", ", ".join(f"{name} {version}" for name, version in machine.versions.items())),
        ("git revision", str(machine.git_revision)),
        ("requests", f"{setup.num_requests} a point, {setup.max_new_tokens} new tokens at most, {setup.stop_rule}"),
        (
            "sampling",
            f"top_p {setup.top_p:g}, top_k {setup.top_k}, min_p {setup.min_p:g}, repetition penalty "
            f"{setup.repetition_penalty:g}, seed {setup.seed}, verifier {setup.verifier}",
        ),
        ("prompts", setup.prompt_format),
        ("cache", setup.cache_policy),
        ("processes", str(setup.num_processes)),
        *(("command", command) for command in commands),
    ]
