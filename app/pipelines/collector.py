"""The answer of one request, response by response: values in the pipeline's words, and how the whole ended."""

import codecs
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from app.domain.errors import ContractViolation, GatewayError
from app.domain.inference import InferenceResponse
from app.pipelines.contract import ContractCheck, TensorContract
from app.pipelines.early_exit import EarlyExitRules
from app.pipelines.outputs import OutputField

Values = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Ending:
    """How the answer ended: the reason of an early exit, and values held back until the end was known."""

    early_exit: str | None
    values: Values | None


class Collector:
    """Pure; one for each request. After an error of :meth:`add` the answer is over."""

    def __init__(
        self,
        fields: Sequence[OutputField],
        contracts: Mapping[str, TensorContract],
        rules: EarlyExitRules,
        judge: Callable[[GatewayError], str],
        *,
        decoupled: bool,
    ) -> None:
        self._fields = fields
        self._contract = ContractCheck(contracts)
        self._rules = rules
        self.judge = judge
        """An error that ended the answer -> the reason of the early exit that it is; raises what the caller is told."""
        self._decoupled = decoupled
        self._texts = {
            field.name: codecs.getincrementaldecoder("utf-8")("replace") for field in fields if field.is_text_run
        }
        self._written: set[str] = set()
        self._filled: set[str] = set()

    def add(self, response: InferenceResponse) -> Values | None:
        """The values of one response, None for one without outputs. Raises ContractViolation."""
        if not response.outputs:
            return None
        self._contract.check(response)
        self._written.update(response.outputs)
        self._filled.update(name for name, tensor in response.outputs.items() if tensor.array.size)
        values = {field.name: self._value_of(field, response) for field in self._fields}
        if response.is_final:
            for name, rest in self._rests_of_text().items():
                values[name] = (values[name] or "") + rest
        return values

    def finish(self) -> Ending:
        """After the last response. Raises ContractViolation where an ordinary model left an output out."""
        reason = self._rules.reason_of_outputs(self._written, self._written - self._filled)
        if reason is None and not self._decoupled:
            self._check_complete()
        rests = self._rests_of_text()
        return Ending(reason, {**self.empty_values(), **rests} if rests else None)

    def empty_values(self) -> Values:
        """The typed empty value of every output."""
        return {field.name: self._empty_value(field) for field in self._fields}

    def _check_complete(self) -> None:
        absent = [field.tensor.name for field in self._fields if field.tensor.name not in self._written]
        if absent:
            raise ContractViolation(
                f"Output '{absent[0]}' was not written.",
                tensor=absent[0],
                hint="If the model may leave it out, say so in gateway.yaml with an early_exit rule: {missing: [...]}.",
            )

    def _value_of(self, field: OutputField, response: InferenceResponse) -> Any:
        tensor = response.outputs.get(field.tensor.name)
        if tensor is None:
            return self._empty_value(field)
        array = field.array_of(tensor)
        if not array.size:
            return self._empty_value(field)
        if field.name in self._texts:
            return self._texts[field.name].decode(array.flat[0])
        return field.value_of(array)

    def _rests_of_text(self) -> Values:
        """What is left of characters that never became whole; each U+FFFD."""
        rests = {name: decoder.decode(b"", final=True) for name, decoder in self._texts.items()}
        return {name: rest for name, rest in rests.items() if rest}

    def _empty_value(self, field: OutputField) -> Any:
        return "" if self._decoupled and field.is_text_run else field.empty_value
