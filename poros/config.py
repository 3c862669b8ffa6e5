"""The run file: one strict model of every setting, read from YAML and `key=value` overrides.

All faults of a file are reported at once, an unknown key with the nearest known one. Strict,
because YAML's own conversions are the usual trap: `steps: "40"` is a mistake to name, not a
number to guess. No torch: `poros init`, `poros check` and `poros plan` read this on a machine
that cannot train.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import yaml
from pydantic import (
    AliasChoices,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
)

from poros.errors import ConfigError, OutputError
from poros.units import parse_size

ALIASES = {"seq_len": "max_seq_length"}


class RunConfig(BaseModel):
    """Settings of one training run. Sizes in tokens and rows; `vram` in bytes or as `12GB`."""

    model_config = ConfigDict(
        extra="forbid", strict=True, validate_default=True, allow_inf_nan=False
    )

    model: str = Field(description="hub id or folder of the base model")
    revision: str | None = Field(None, description="branch, tag or commit of the model")
    trust_remote_code: bool = Field(False, description="run Python code that the model ships")
    data: str = Field(description="hub dataset id, or a jsonl, json, csv, parquet or txt file")
    data_split: str = Field("train", description="split of a hub dataset")
    data_format: Literal[
        "auto", "text", "prompt-completion", "messages", "alpaca", "sharegpt", "oasst"
    ] = Field("auto", description="how rows are read; auto looks at the columns")
    eval_data: str | None = Field(None, description="held-out data; default: split from data")
    eval_rows: int = Field(
        0,
        ge=0,
        description="rows held out of data for evaluation when eval_data is not set",
    )
    output: str = Field("./poros_output/run", description="folder of this run")

    quantization: Literal["nf4", "bf16", "int8"] = Field(
        "nf4", description="precision of the frozen base; int8 does not stream"
    )
    nf4_load_strategy: Literal["auto", "streamed", "standard"] = Field(
        "auto", description="auto and streamed never put the whole base on the device"
    )
    block_size: int | Literal["auto"] = Field(
        "auto", description="blocks that VRAM holds at once (slots)"
    )
    micro_rows: int | None = Field(
        None, ge=1, description="rows of the batch that pass through a block at a time"
    )
    device: Literal["auto", "cuda", "cpu"] = Field("auto", description="where to train")
    vram: str | int | None = Field(None, description="VRAM the run may use, such as 12GB")

    lora_rank: int = Field(16, ge=1, description="rank of every adapter")
    lora_alpha: int | float = Field(
        32, gt=0, description="adapters are scaled by lora_alpha / lora_rank"
    )
    lora_dropout: float = Field(0.0, ge=0, lt=1, description="dropout before every adapter")
    target_modules: str | list[str] = Field(
        "all-linear",
        description="all-linear, one name, a regular expression or a list of names",
    )

    steps: int | None = Field(None, ge=1, description="optimizer steps; overrides epochs")
    epochs: float = Field(1.0, gt=0, description="passes over the data when steps is not set")
    max_seq_length: int = Field(
        512,
        ge=1,
        description="tokens of a row; longer rows are cut",
        validation_alias=AliasChoices("max_seq_length", "seq_len"),
    )
    batch_size: int = Field(1, ge=1, description="rows of one forward")
    gradient_accumulation_steps: int = Field(1, ge=1, description="forwards of one step")
    learning_rate: float = Field(2e-4, gt=0, description="highest learning rate of the run")
    lr_scheduler: str = Field("cosine", description="a transformers scheduler name")
    warmup_steps: int = Field(0, ge=0, description="steps until the learning rate is reached")
    optimizer: str = Field("adamw_torch", description="a transformers optimizer name")
    weight_decay: float = Field(0.0, ge=0, description="decay of the adapter weights")
    max_grad_norm: float = Field(1.0, ge=0, description="gradients are clipped to it; 0: never")
    seed: int = Field(42, ge=0, description="seed of adapters, shuffling and dropout")

    log_steps: int = Field(1, ge=1, description="steps between two log rows")
    save_steps: int = Field(0, ge=0, description="0: save at the end only")
    eval_steps: int = Field(0, ge=0, description="0: evaluate before and after only")
    prompt: str | None = Field(None, description="answered before and after training")

    @field_validator("model", "data", "eval_data", "output")
    @classmethod
    def _home(cls, value: str | None) -> str | None:
        # Hub ids never begin with a tilde, so what does is a path.
        if value is not None and not value.strip():
            raise ValueError("must not be empty")
        return os.path.expanduser(value) if value is not None else None

    @field_validator("quantization", mode="before")
    @classmethod
    def _older_name(cls, value: Any) -> Any:
        return "bf16" if value == "bf16_bitwise" else value

    @field_validator("learning_rate", "epochs", "lora_dropout", "weight_decay", mode="before")
    @classmethod
    def _yaml_floats(cls, value: Any) -> Any:
        # YAML 1.1 reads 2e-4 as a string, because it has no dot.
        if isinstance(value, str):
            try:
                return float(value)
            except ValueError:
                return value
        return float(value) if isinstance(value, int) and not isinstance(value, bool) else value

    @field_validator("block_size")
    @classmethod
    def _at_least_one_block(cls, value: int | str) -> int | str:
        if isinstance(value, int) and value < 1:
            raise ValueError("must be 1 or more, or auto")
        return value

    @field_validator("vram")
    @classmethod
    def _readable_size(cls, value: str | int | None) -> str | int | None:
        if value is not None and parse_size(value) < 1:
            raise ValueError("must be more than 0 bytes")
        return value

    # A field validator, not a model validator: those run only once every field is right, and
    # would hold this fault back until the others are mended.
    @field_validator("eval_steps")
    @classmethod
    def _something_to_evaluate(cls, value: int, info: ValidationInfo) -> int:
        known = {"eval_data", "eval_rows"} <= info.data.keys()
        if value and known and not (info.data["eval_data"] or info.data["eval_rows"]):
            raise ValueError("there is nothing to evaluate: set eval_rows or eval_data too")
        return value

    def plan_options(self) -> dict[str, Any]:
        """What a plan takes from the run, as `poros.plan.make_plan` names it.

        The device and its free memory are the machine's: they are not among them.
        """
        return {
            "quantization": self.quantization,
            "block_size": self.block_size,
            "batch_size": self.batch_size,
            "seq_len": self.max_seq_length,
            "lora_rank": self.lora_rank,
            "target_modules": self.target_modules,
            "optimizer": self.optimizer,
            "micro_rows": self.micro_rows,
            "gradient_accumulation_steps": self.gradient_accumulation_steps,
            "autocast": True,  # the trainer's own choice, always
            # TRL keeps adapters on a 4-bit base in bf16, as the QLoRA paper did; PEFT all others
            # in float32.
            "adapter_bytes": 2 if self.quantization == "nf4" else 4,
        }


def read_config(path: Path, overrides: Iterable[str] = ()) -> RunConfig:
    """The run that the YAML file at `path` describes, changed by `key=value` texts.

    A value of an override is read as YAML reads a scalar (`steps=40`, `vram=12GB`,
    `eval_data=null`), or as a list where it begins with a bracket.

    Raises:
        ConfigError: the file or an override cannot be read, or describes no run; every fault of
            the keys and values at once.
    """
    values, faults = _read_yaml(path)
    return _validate(values, overrides, str(path), faults)


def make_config(
    values: Mapping[str, Any], overrides: Iterable[str] = (), source: str = "arguments"
) -> RunConfig:
    """The run that `values` describe, keyed as in the run file, changed as in `read_config`.

    `source` names the values in errors.

    Raises:
        ConfigError: the values describe no run; every fault at once.
    """
    return _validate(values, overrides, source, [])


def write_config(path: Path, **known: Any) -> None:
    """Write a run file in which every setting is visible: `known` ones as given, else defaults.

    Raises:
        ConfigError: `known` describes no run.
        OutputError: the file exists already or cannot be written.
    """
    make_config(known)
    values, _ = _canonical(known)
    lines = [
        "# A Poros run. Check it: poros check FILE. Start it: poros train FILE.",
        "",
    ]
    for name, field in RunConfig.model_fields.items():
        value = values.get(name, field.get_default())
        lines.append(f"# {field.description}{_choices(field.annotation)}")
        lines.append(yaml.safe_dump({name: value}, allow_unicode=True, width=10**6))
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write("\n".join(lines))
    except FileExistsError:
        raise OutputError(f"{path} exists already: name another file, or remove it") from None
    except OSError as error:
        raise OutputError(f"{path} cannot be written: {error.strerror}") from None


class _Loader(yaml.SafeLoader):
    """YAML that remembers a key given twice, of which PyYAML would silently keep the last."""

    def __init__(self, stream: Any) -> None:
        super().__init__(stream)
        self.duplicates: list[str] = []

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        first: dict[str, int] = {}
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue
            line = key.start_mark.line + 1
            if key.value in first:
                self.duplicates.append(
                    f"{key.value}: given twice, in line {first[key.value]} and line {line};"
                    " keep one of them"
                )
            first.setdefault(key.value, line)
        return super().construct_mapping(node, deep)


def _read_yaml(path: Path) -> tuple[dict[str, Any], list[str]]:
    """The mapping that a file holds, and the keys that it holds twice."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(
            f"{path}: no such file; write one with `poros init {path} -m MODEL -d DATA`"
        ) from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not a UTF-8 text file (byte {error.start})") from None
    loader: _Loader | None = None
    try:
        loader = _Loader(text)
        values = loader.get_single_data()
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not valid YAML: {_one_line(error)}") from None
    finally:
        if loader is not None:
            loader.dispose()
    if values is None:
        raise ConfigError(
            f"{path}: the file is empty; wanted `key: value` lines, at least model and data"
        )
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: found {_kind(values)}, wanted `key: value` lines")
    return {str(key): value for key, value in values.items()}, loader.duplicates


def _read_scalar(text: str) -> Any:
    if text[:1] in ("[", '"', "'"):
        return yaml.safe_load(text)
    # The plain scalar alone: as a document, `a: b` would be a mapping and `issue #5` lose its end.
    loader = yaml.SafeLoader("")
    tag = loader.resolve(yaml.ScalarNode, text, (True, False))  # type: ignore[no-untyped-call]
    node = yaml.ScalarNode(tag, text)
    return loader.construct_object(node)


def _canonical(values: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """`values` under the first name of each setting, and the settings given under two names."""
    canonical: dict[str, Any] = {}
    faults = []
    for key, value in values.items():
        name = ALIASES.get(key, key)
        if name in canonical:
            one, other = [key for key in values if ALIASES.get(key, key) == name]
            faults.append(f"{one} and {other} are one setting; keep one of them")
        canonical[name] = value
    return canonical, faults


def _validate(
    given: Mapping[str, Any], overrides: Iterable[str], source: str, faults: list[str]
) -> RunConfig:
    values, clashes = _canonical(given)
    faults += clashes
    for override in overrides:
        key, equals, text = override.partition("=")
        if not equals or not key:
            faults.append(f"override {override!r}: wanted key=value, such as steps=40")
            continue
        try:
            values[ALIASES.get(key, key)] = _read_scalar(text)
        except (yaml.YAMLError, ValueError) as error:
            faults.append(f"override {override!r}: not a YAML value: {_one_line(error)}")
    wanted: dict[str, list[str]] = {}
    config = None
    try:
        config = RunConfig.model_validate(values)
    except ValidationError as error:
        for detail in error.errors(include_url=False):
            name, *inner = detail["loc"]
            text = detail["msg"].removeprefix("Value error, ")
            text = text.replace("Input should be", "wanted", 1)
            if inner and isinstance(inner[-1], int):
                text += f" as item {inner[-1] + 1}"
            wanted.setdefault(str(name), []).append(text)
    list_known = False
    for key, texts in wanted.items():
        if key not in RunConfig.model_fields:
            names = [*RunConfig.model_fields, *ALIASES]
            near = difflib.get_close_matches(key, names, n=1, cutoff=0.5)
            list_known |= not near
            faults.append(f"{key}: unknown key" + (f"; did you mean {near[0]}?" if near else ""))
        elif key not in values:
            faults.append(f"{key}: missing; wanted the {RunConfig.model_fields[key].description}")
        else:
            # A union reports each of its members: they make one line.
            found = f"{key}: found {_shown(values[key])} ({_kind(values[key])})"
            faults.append(f"{found}, {' or '.join(texts)}")
    if config is None or faults:
        if list_known:
            faults.append(f"known keys: {', '.join(RunConfig.model_fields)}")
        raise ConfigError(f"{source} cannot be used:\n" + "\n".join(f"  {x}" for x in faults))
    return config


def _shown(value: Any) -> str:
    """A value as YAML writes it, as far as that differs from Python."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return repr(value)


def _kind(value: Any) -> str:
    names: dict[type, str] = {str: "text", bool: "a truth value", list: "a list"}
    names |= {
        dict: "a mapping",
        int: "a whole number",
        float: "a number",
        type(None): "nothing",
    }
    return names.get(type(value), type(value).__name__)


def _choices(annotation: Any) -> str:
    """The values of a setting that takes one of a few texts, else nothing."""
    if get_origin(annotation) is Literal:
        return f" ({' | '.join(get_args(annotation))})"
    return ""


def _one_line(error: Exception) -> str:
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        mark = error.problem_mark
        return f"line {mark.line + 1}, column {mark.column + 1}: {error.problem}"
    return " ".join(str(error).split()) or type(error).__name__
