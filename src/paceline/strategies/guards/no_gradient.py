"""A gradient without values, for a loop that looks for one where none is: every operation on it says so in place of working."""

from __future__ import annotations

from typing import Any, NoReturn, Self

from torch import Tensor

from paceline.compat.tensors import make_wrapper


class NoGradient(Tensor):
    """Takes the place of a gradient; every operation on it raises, those of autograd's own engine included."""

    @staticmethod
    def refuse_use() -> NoReturn:
        """Raise for a loop that works with it."""
        raise NotImplementedError

    @classmethod
    def of(cls, leaf: Tensor) -> Self:
        """Return one that torch takes for a gradient of `leaf`; it needs no memory."""
        made: Self = make_wrapper(cls, leaf.shape, dtype=leaf.dtype, device=leaf.device)
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        """Refuse what the loop calls."""
        del func, types, args, kwargs
        cls.refuse_use()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Refuse what a backward pass adds."""
        del func, types, args, kwargs
        cls.refuse_use()
