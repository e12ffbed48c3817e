"""What hostile models do with their outputs."""

from collections.abc import Callable

from tests.toolkit.engine import Distort, Outputs, outputs_of


def of_items(outputs: Outputs) -> list[int]:
    return [-int(each) for each in outputs["NEGATIVE"].array[:, 0]]


def with_rows(change: Callable[[list[int]], list[int]]) -> Distort:
    """Changes the rows of a call with more than one."""
    return lambda outputs: outputs_of(change(of_items(outputs))) if len(of_items(outputs)) > 1 else outputs


def without_text(outputs: Outputs) -> Outputs:
    return outputs if len(of_items(outputs)) == 1 else {"NEGATIVE": outputs["NEGATIVE"]}
