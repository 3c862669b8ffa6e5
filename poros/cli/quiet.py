"""How the libraries behave under a command: silent to developers, idle while they wait."""

from __future__ import annotations

import logging
import os
import sys
import warnings


def quieten() -> None:
    """Silence developers' notices, telemetry, progress bars in log files, and spinning threads.

    Before anything imports torch.
    """
    # Read when torch is loaded: threads that spin while they wait slow a busy machine down badly.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")  # TRL would report every run
    # On import it reports that an optional CPU kernel is not there.
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=FutureWarning)
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    import datasets
    import transformers

    datasets.disable_progress_bars()
    if not sys.stderr.isatty():
        transformers.utils.logging.disable_progress_bar()
