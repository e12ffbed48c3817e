"""How much of a pipeline's time does an early exit save, and do the skipped steps really not run?"""

from functools import partial

from benchmarks.stage import ROOT, Stage, stage
from benchmarks.table import Table
from benchmarks.timing import Call, Durations, interleaved, ratio

PIPELINES = ("ocr", "ocr_bls")
SKIPPED = "text_recognize"
EXITS = 100


async def run(rounds: int) -> list[Table]:
    """Compares an image with three lines of text with a blank image of the same size, through the gateway."""
    async with stage() as on:
        return [await _latency(on, rounds), await _executions(on)]


async def _latency(on: Stage, rounds: int) -> Table:
    cases = {f"{name} {image}": _post(on, name, image) for name in PIPELINES for image in ("sign", "blank")}
    found = await interleaved(cases, rounds)
    rows = [_row(name, found[f"{name} sign"], found[f"{name} blank"]) for name in PIPELINES]
    return Table("Latency", ["pipeline", "full (sign.png)", "early exit (blank.png)", "early exit / full"], rows)


async def _executions(on: Stage) -> Table:
    rows = []
    for name in PIPELINES:
        before = await on.triton.executions("text_detect", SKIPPED)
        for _ in range(EXITS):
            answer = await on.gateway.post_file(name, image=_image("blank"))
            assert answer["early_exit"] == "no_text"
        after = await on.triton.executions("text_detect", SKIPPED)
        rows += [
            [name, step, str(was), str(now)]
            for step, was, now in zip(("text_detect", SKIPPED), before, after, strict=True)
        ]
    columns = ["pipeline", "step", "executions before", f"after {EXITS} early exits"]
    return Table("nv_inference_exec_count", columns, rows)


def _row(name: str, full: Durations, early: Durations) -> list[str]:
    return [name, str(full), str(early), ratio(early, full)]


def _post(on: Stage, name: str, image: str) -> Call:
    return partial(on.gateway.post_file, name, image=_image(image))


def _image(name: str) -> bytes:
    return (ROOT / "samples" / f"{name}.png").read_bytes()
