"""What every engine refuses, in the same words."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from torch import Tensor

from areal_hpc.rollout.engines.base import Request


def check_requests(requests: Sequence[Request], max_context_tokens: int) -> None:
    """Raises ValueError for an empty prompt or one that cannot fit the context with its answer, and for an answer begun that leaves nothing to sample."""
    for request in requests:
        num_prompt = len(request.prompt_tokens)
        if num_prompt < 1 or request.max_new_tokens < 1 or num_prompt + request.max_new_tokens > max_context_tokens:
            raise ValueError(
                f"request {request.request_id}: prompt of {num_prompt} and max_new_tokens={request.max_new_tokens} "
                f"must both be above zero and fit the context of {max_context_tokens} tokens together"
            )
        if request.begun is not None and len(request.begun.tokens_R) >= request.max_new_tokens:
            raise ValueError(f"request {request.request_id}: {len(request.begun.tokens_R)} tokens begun leave none of max_new_tokens={request.max_new_tokens}")
        if request.temperature < 0:
            raise ValueError(f"request {request.request_id}: temperature={request.temperature} must be zero or more")


def check_context(max_context_tokens: int, models: int) -> None:
    """Raises ValueError when sequences may become longer than the model allows."""
    if max_context_tokens > models:
        raise ValueError(f"max_context_tokens={max_context_tokens} exceeds the model's context of {models}")


def whole_model(named_tensors: Iterable[tuple[str, Tensor]], shapes: Mapping[str, Sequence[int]]) -> dict[str, Tensor]:
    """All weights by name, each there once and of its shape. Raises ValueError naming the first that is not."""
    tensors: dict[str, Tensor] = {}
    for name, tensor in named_tensors:
        if name not in shapes:
            raise ValueError(f"unknown weight {name}; the model has {len(shapes)} weights, first {next(iter(shapes))}")
        if name in tensors:
            raise ValueError(f"weight {name} was given twice")
        if tuple(tensor.shape) != tuple(shapes[name]):
            raise ValueError(f"weight {name} has shape {tuple(tensor.shape)}; the model needs {tuple(shapes[name])}")
        tensors[name] = tensor
    for name in shapes:
        if name not in tensors:
            raise ValueError(f"weight {name} is missing; {len(tensors)} of {len(shapes)} were given")
    return tensors
