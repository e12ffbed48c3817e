"""The sequence ids that the models of a request accept.

Triton 2.51 does not compare an id with the model's correlation-id control. A text in a numeric control overwrites the
memory of Triton, a number in a text control ends the model's process, and a control of 32 bits gets the low bits of a
larger number, which may be the id of another sequence.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from app.core.errors import InvalidInput
from app.core.inference import BYTES
from app.core.model import ModelConfig, reached

MAX_ID_BYTES = 128
"""Triton's limit for a text, which it counts in bytes."""
_LARGEST = {"UINT64": 2**64 - 1, "INT64": 2**63 - 1, "UINT32": 2**32 - 1, "INT32": 2**31 - 1}
_DANGEROUS_BYTES = range(125, 128)
"""Triton 2.51 sends a text control in 132 bytes. The Python backend ends if 1 to 3 bytes remain behind the text."""

OwnIds = range | str
"""Ids that the gateway makes itself: a range of numbers, or the start of texts."""


@dataclass(frozen=True, slots=True)
class SequenceIds:
    """``needed_by``: a model that runs no request without an id, or empty.

    ``made_for``: a model with ``iterative_sequence``, or empty. Triton numbers its sequences from 1, so an id of a
    caller could be the id of another caller's request.
    """

    needed_by: str = ""
    made_for: str = ""
    max_number: int = _LARGEST["UINT64"]
    """0: numbers are not allowed."""
    takes_text: bool = True
    is_text_tensor: bool = False
    """Whether a model gets the text as a tensor."""
    reserved: frozenset[OwnIds] = frozenset()
    """Those that the gateway makes itself for the same models."""

    @property
    def form(self) -> str:
        """Describes the allowed ids."""
        text = f"a text of 1 to {MAX_ID_BYTES} bytes"
        text += f" that does not have {_DANGEROUS_BYTES[0]} to {_DANGEROUS_BYTES[-1]} bytes" * self.is_text_tensor
        number = f"an integer of 1 to {self.max_number}"
        forms = [number] * (self.max_number > 0) + [text] * self.takes_text
        return "no id fits all models that it runs" if self.made_for or not forms else " or ".join(forms)

    def check(self, sequence_id: object) -> None:
        """``sequence_id``: 0 or an empty text means that there is none, as in Triton. Raises InvalidInput."""
        if sequence_id in (0, ""):
            if self.needed_by:
                text = f"inference request to model '{self.needed_by}' must specify a non-zero or non-empty correlation"
                raise InvalidInput(
                    f"{text} ID.",
                    hint=f"Send the parameter `sequence_id`, {self.form}, with each request of a sequence, "
                    "`sequence_start: true` with the first and `sequence_end: true` with the last.",
                )
        elif self.made_for:
            text = f"parameter 'sequence_id' is not allowed: Triton makes the id for model '{self.made_for}'."
            raise InvalidInput(text, hint="The model has `iterative_sequence: true`.")
        elif not self._fits(sequence_id):
            raise InvalidInput(f"parameter 'sequence_id' has invalid type or value; expected {self.form}.")
        elif any(
            isinstance(sequence_id, str) and sequence_id.startswith(own)
            if isinstance(own, str)
            else isinstance(sequence_id, int) and sequence_id in own
            for own in self.reserved
        ):
            text = "parameter 'sequence_id' is one of those that the gateway makes itself for this model."
            raise InvalidInput(text, hint=f"Use an id that is not {' or '.join(sorted(map(_words, self.reserved)))}.")

    def _fits(self, sequence_id: object) -> bool:
        if isinstance(sequence_id, str):
            size = len(sequence_id.encode("utf-8", "surrogatepass"))
            is_dangerous = self.is_text_tensor and size in _DANGEROUS_BYTES
            return self.takes_text and size <= MAX_ID_BYTES and not is_dangerous
        return type(sequence_id) is int and 0 < sequence_id <= self.max_number


def _words(own: OwnIds) -> str:
    return f"a text that begins with '{own}'" if isinstance(own, str) else f"from {own[0]} to {own[-1]}"


def sequence_ids_of(config: ModelConfig, models: Mapping[str, ModelConfig]) -> SequenceIds:
    """``models``: by name, at least those that a request to ``config`` runs through.

    A step of an ensemble gets the id of the request. A BLS script may pass the id on, or use its own.
    """
    below = reached(config, models)
    given_id = reached(config, models, by_steps=True)
    datatypes = {each.sequence.id_datatype for each in below if _needs_id(each) and each.sequence}
    largest = [_LARGEST[each] for each in datatypes if each in _LARGEST]
    return SequenceIds(
        needed_by=next((each.name for each in given_id if _needs_id(each)), ""),
        made_for=next((each.name for each in below if each.sequence and each.sequence.is_iterative), ""),
        max_number=0 if BYTES in datatypes else min(largest, default=_LARGEST["UINT64"]),
        takes_text=not largest,
        is_text_tensor=BYTES in datatypes,
    )


def _needs_id(config: ModelConfig) -> bool:
    return config.sequence is not None and not config.sequence.is_iterative
