"""Models of Hugging Face's: their losses as sums and weights, tasks, weights from and to their folders. Names load on first use.

Nothing here is loaded, nor `transformers`, by anybody who does not use it: `pip install 'paceline[hf]'` brings it and `peft`.
"""

from typing import TYPE_CHECKING

from paceline import lazy

if TYPE_CHECKING:
    from paceline.hf.losses import loss
    from paceline.hf.saving import save_pretrained
    from paceline.hf.transformers_task import TransformersTask, task
    from paceline.hf.weights import from_folder, load_weights

__all__ = ["TransformersTask", "from_folder", "load_weights", "loss", "save_pretrained", "task"]

__getattr__, __dir__ = lazy.names(
    __name__,
    {
        "TransformersTask": "paceline.hf.transformers_task",
        "from_folder": "paceline.hf.weights",
        "load_weights": "paceline.hf.weights",
        "loss": "paceline.hf.losses",
        "save_pretrained": "paceline.hf.saving",
        "task": "paceline.hf.transformers_task",
    },
)
