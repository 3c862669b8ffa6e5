"""Fine-tune LoRA adapters while the frozen base streams from host memory, block by block.

Nothing heavy is imported here: `import poros` must not bring torch, so the four names of the
API are looked up when they are first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from poros.errors import PorosError, PorosOOMError

if TYPE_CHECKING:
    from poros.api import PorosTrainer, load, stream, unstream

__version__ = "0.1.0"
__all__ = ["PorosError", "PorosOOMError", "PorosTrainer", "load", "stream", "unstream"]

_API = ("PorosTrainer", "load", "stream", "unstream")


def __getattr__(name: str) -> Any:
    if name not in _API:
        raise AttributeError(f"module 'poros' has no attribute {name!r}")
    from poros.hardware import require_packages

    require_packages()
    from poros import api

    return getattr(api, name)
