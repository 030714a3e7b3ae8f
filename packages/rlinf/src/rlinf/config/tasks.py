"""Config of tasks, the sources of problems and answers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, model_validator

from rlinf.config.base import Conflict, DataPath, Section


def _one_or_several(value: Any) -> Any:
    """Turns a single file into a tuple: `x.jsonl` means `[x.jsonl]`."""
    return (value,) if isinstance(value, str) else tuple(value) if isinstance(value, list) else value


Files = Annotated[tuple[DataPath, ...], BeforeValidator(_one_or_several)]
"""Paths of files, a single one or a list."""


class _Task(Section):
    num_held_out: int = Field(
        default=500,
        ge=1,
        description="Maximum number of problems that an evaluation uses. Generated tasks make this many, which are "
        "never trained on; of task.eval_files the first ones are used. Without eval_files at most a tenth of the "
        "training problems.",
    )


class _GeneratedTask(_Task):
    SIZE: ClassVar[str] = "num_digits"
    """The key that sets the length of its problems; empty: there is none."""
    NEEDS_AGENT: ClassVar[bool] = False
    """Whether its episodes have several turns."""

    @property
    def sizes(self) -> dict[str, int]:
        """Key -> value of what makes its problems larger."""
        return {self.SIZE: getattr(self, self.SIZE)} if self.SIZE else {}

    @property
    def num_tokens(self) -> tuple[int, int]:
        """Tokens of a prompt, and of the longest turn that answers it; without its end token."""
        raise NotImplementedError


class _EpisodesTask(_GeneratedTask):
    NEEDS_AGENT = True


class SortTask(_GeneratedTask):
    """Sort the digits of a number: `58312047=` -> `01234578`."""

    kind: Literal["sort"]
    num_digits: int = Field(default=8, ge=1, le=32, description="Digits to sort.")

    @property
    def num_tokens(self) -> tuple[int, int]:
        return self.num_digits + 1, self.num_digits


class AddTask(_GeneratedTask):
    """Add two numbers of a fixed width: `12+34=` -> `046`."""

    kind: Literal["add"]
    num_digits: int = Field(default=2, ge=1, le=32, description="Digits of each number.")

    @property
    def num_tokens(self) -> tuple[int, int]:
        return 2 * self.num_digits + 2, self.num_digits + 1


class CalculateTask(_EpisodesTask):
    """Multiply two numbers with a calculator: `347*582=`, the call `[calc:347*582]`, its result, `201954`."""

    kind: Literal["calculate"]
    num_digits: int = Field(default=3, ge=1, le=8, description="Digits of each number.")

    @property
    def num_tokens(self) -> tuple[int, int]:
        return 2 * self.num_digits + 2, len("[calc:*]") + 2 * self.num_digits


CELL = 16
"""Pixels of the side of a cell in pictures of generated tasks."""


class _DrawnTask(_GeneratedTask):
    """A task whose prompts have a picture; its tokens come on top of `num_tokens`."""

    shuffle_pictures: bool = Field(
        default=False,
        description="Give each problem the picture of another, as a control: what is then learned does not come from "
        "the pictures.",
    )

    @property
    def picture_size(self) -> tuple[int, int]:
        """Width and height in pixels."""
        raise NotImplementedError


class CountShapesTask(_DrawnTask):
    """Count the shapes of a color: a picture and `blue?=` -> `3`."""

    SIZE = "num_cells"

    kind: Literal["count-shapes"]
    num_cells: int = Field(default=3, ge=2, le=16, description="Cells of 16 pixels in a row and in a column.")

    @property
    def num_tokens(self) -> tuple[int, int]:
        return len("blue?="), 1

    @property
    def picture_size(self) -> tuple[int, int]:
        return CELL * self.num_cells, CELL * self.num_cells


class GuiClickTask(_DrawnTask):
    """Click the button with a letter in a window: a picture and `tap H=` -> `click(2,0)`, its column and row."""

    SIZE = "num_cells"

    kind: Literal["gui-click"]
    num_cells: int = Field(default=3, ge=2, le=10, description="Cells of 16 pixels in a row and in a column.")
    num_buttons: int = Field(default=4, ge=1, le=4, description="Buttons in the window, each with another letter.")

    @property
    def sizes(self) -> dict[str, int]:
        return {"num_cells": self.num_cells, "num_buttons": self.num_buttons}

    @property
    def num_tokens(self) -> tuple[int, int]:
        return len("tap H="), len("click(2,0)")

    @property
    def picture_size(self) -> tuple[int, int]:
        return CELL * self.num_cells, CELL * self.num_cells


class ChartReadTask(_DrawnTask):
    """Read the height of a bar off a chart: a picture and `blue=` -> `7`."""

    SIZE = "num_bars"

    kind: Literal["chart-read"]
    num_bars: int = Field(default=3, ge=1, le=6, description="Bars of the chart, each 16 pixels wide.")

    @property
    def num_tokens(self) -> tuple[int, int]:
        return len("blue="), 1

    @property
    def picture_size(self) -> tuple[int, int]:
        return CELL * self.num_bars, CELL * 3


class PictureColumnConfig(Section):
    """Where rows have pictures."""

    images: Annotated[str, Field(min_length=1)] | Literal[False] | None = Field(
        default=None,
        description="Column of the pictures, one or a list of them: paths, bytes or data URLs "
        "(docs/vision-language.md). null: images or image, the first that a row has; false: columns of "
        "pictures are ignored.",
    )
    videos: Annotated[str, Field(min_length=1)] | Literal[False] | None = Field(
        default=None,
        description="Column of the videos, one or a list of them: files in the forms of pictures, or lists of frames. "
        "null: videos or video; false: columns of videos are ignored.",
    )


class PictureConfig(Section):
    """How pictures and videos of rows are read (docs/vision-language.md)."""

    min_pixels: int | None = Field(
        default=None,
        ge=1,
        description="Pictures with fewer pixels are enlarged; null: as the model's preprocessor_config.json says.",
    )
    max_pixels: int | None = Field(
        default=None,
        ge=1,
        description="Pictures with more pixels are reduced, so that a prompt has fewer tokens; null: as the model's "
        "preprocessor_config.json says. Frames of videos have the same limits.",
    )
    video_fps: float = Field(
        default=2.0,
        gt=0,
        description="Frames that are taken of a second of a video, at least 4 of a video that has them; of a list of "
        "frames, how many are of a second.",
    )
    max_frames: int = Field(
        default=64, ge=1, description="Maximum number of frames of a video; of a longer one they are spread evenly."
    )
    fetch_pictures: bool = Field(
        default=False,
        description="Whether pictures with http(s) URLs are fetched, once and before anything starts. false: such a "
        "row is a bad row.",
    )


class ColumnsConfig(PictureColumnConfig):
    """Names of columns; `outer.inner` for one inside another."""

    prompt: str | None = Field(
        default=None,
        min_length=1,
        description="Column of the problem: text, or the turns of a chat. null: prompt, question, problem, messages or "
        "another usual name, the first that a row has.",
    )
    answer: str | None = Field(
        default=None,
        min_length=1,
        description="Column of the reference answer. null: answer, ground_truth, reward_model.ground_truth or another "
        "usual name, else the assistant's last turn; rewards that compare with nothing need none.",
    )


class MixtureSource(Section):
    """One source of a mixture. What it leaves out is as in `task`."""

    HUB_USE = "rows"

    files: Files = Field(min_length=1, description="As task.train_files.")
    weight: float = Field(default=1.0, gt=0, description="Share of the problems, relative to the other sources.")
    columns: ColumnsConfig | None = Field(default=None, description="As task.columns.")
    prompt_template: str | None = Field(default=None, description="As task.prompt_template.")
    answer_format: Literal["gsm8k", "exact"] | None = Field(default=None, description="As task.answer_format.")


@dataclass(frozen=True, kw_only=True, slots=True)
class RowSettings:
    """How the rows of a source become problems."""

    columns: ColumnsConfig
    prompt_template: str
    answer_format: Literal["gsm8k", "exact"]

    @property
    def placeholder(self) -> str:
        """Name of the placeholder for the problem, beside {question}."""
        return self.columns.prompt or "question"


class FilesTask(_Task, PictureConfig):
    """Problems from data files or from data sets on the Hugging Face Hub; GSM8K for example."""

    HUB_USE = "rows"

    kind: Literal["files"]
    train_files: Files = Field(
        description="Problems to train on: files, folders, patterns (data/train-*.parquet) or names on the Hub "
        "(openai/gsm8k:main[train]); docs/data.md.",
    )
    mixture: dict[str, MixtureSource] = Field(
        default={},
        description="Name -> source, in place of train_files: in every thousand problems each source has its share. A "
        "row gets its source's name as data_source, unless it has one; reward.kind by_source reads it.",
    )
    eval_files: Files = Field(
        default=(),
        description="Problems to evaluate on, named the same way. At most num_held_out are used, the first ones. "
        "Empty: random training problems, at most a tenth of them, which are then not trained on.",
    )
    eval_source: str | None = Field(
        default=None,
        description="data_source of the rows of eval_files that have none, for reward.kind by_source. Rows of "
        "eval_sets get the name of their set.",
    )
    eval_sets: dict[str, DataPath] = Field(
        default={},
        description="Name -> file of further evaluation problems, all of which are used; each set gets its own curve. "
        "A file under the name of a published set (aime24, math500, ...) has that set's columns, others those of the "
        "other files.",
    )
    columns: ColumnsConfig = Field(default=ColumnsConfig(), description="Where a row has its problem and its answer.")
    prompt_template: str = Field(
        default="{question}\n",
        description="Prompt given to the model, including the instruction, with {question}, or columns.prompt in "
        "braces, where the problem goes. Not used for problems that are chats.",
    )
    prompt_format: Literal["auto", "plain", "chat"] = Field(
        default="auto",
        description="plain: the prompt unchanged. chat: the prompt as the user's message in the tokenizer's chat "
        "template. auto: chat if the tokenizer has a template. rlinf eval uses the same format for the run's model.",
    )
    system_prompt: str | None = Field(default=None, description="System message before the prompt, in a chat.")
    chat_options: dict[str, bool | int | float | str] = Field(
        default={}, description="Arguments of the chat template, for example {enable_thinking: false}."
    )
    answer_format: Literal["gsm8k", "exact"] = Field(
        default="exact",
        description="What the answer column holds. gsm8k: a text with a number, usually a solution that ends in "
        "`#### number`; a row without a number is an error. exact: the answer alone, any text. A reward gets the text "
        "unchanged either way.",
    )
    long_prompts: Literal["stop", "keep_end", "drop"] = Field(
        default="stop",
        description="How to treat prompts longer than rollout.max_prompt_tokens. stop: raise an error before anything "
        "starts. keep_end: cut off the beginning. drop: leave the problem out. The last two are counted in the run's "
        "notes.",
    )
    drop_duplicates: bool = Field(
        default=False,
        description="Train on a problem that occurs several times with the same answer only once. Dropped ones are "
        "counted in the run's notes.",
    )
    on_bad_row: Literal["stop", "skip"] = Field(
        default="stop",
        description="How to treat a row that is not a valid problem (torn; a field missing, empty or of another type; "
        "an answer without its number). stop: raise an error with file and line. skip: leave it out and count it in "
        "the run's notes.",
    )

    @model_validator(mode="before")
    @classmethod
    def _mixture_alone(cls, values: Any) -> Any:
        """A mixture takes the place of the recipe's train_files, which are null."""
        if isinstance(values, dict) and values.get("mixture") and values.get("train_files") is None:
            return {**values, "train_files": ()}
        return values

    @property
    def sources(self) -> dict[str, MixtureSource]:
        """The sources of training problems by name; train_files are one without a name."""
        return dict(self.mixture) or {"": MixtureSource(files=self.train_files)}

    def row_settings(self, source: MixtureSource | None = None) -> RowSettings:
        """Those of a source, with the task's for what it leaves out; those of the task without a source."""
        return RowSettings(
            columns=(source and source.columns) or self.columns,
            prompt_template=(source and source.prompt_template) or self.prompt_template,
            answer_format=(source and source.answer_format) or self.answer_format,
        )

    @property
    def all_files(self) -> list[Path]:
        """Everything that is read."""
        files = [path for source in self.sources.values() for path in source.files]
        return [*files, *self.eval_files, *self.eval_sets.values()]

    def conflicts(self) -> Iterator[Conflict]:
        if bool(self.train_files) == bool(self.mixture):
            text = " and task.mixture are both set" if self.mixture else " is empty, and so is task.mixture"
            yield Conflict(keys=("task.train_files", "task.mixture"), text=f"{text}; give one of them")
        sections = {"task": self.row_settings()}
        sections |= {f"task.mixture.{name}": self.row_settings(source) for name, source in self.mixture.items()}
        for at, rows in sections.items():
            key = f"{at}.prompt_template"
            yield from template_conflicts(rows.prompt_template, rows.placeholder, key, "columns.prompt")
        if self.prompt_format == "plain":
            yield from chat_conflicts(self.system_prompt, self.chat_options, "task.")


def chat_conflicts(system_prompt: str | None, chat_options: Mapping[str, object], at: str) -> Iterator[Conflict]:
    """Yields chat settings that are set for plain prompts; `at` is the prefix of their keys."""
    if system_prompt is not None or chat_options:
        yield Conflict(
            keys=(f"{at}chat_options" if system_prompt is None else f"{at}system_prompt", f"{at}prompt_format"),
            text=f" is set, but {at}prompt_format=plain is no chat; use prompt_format chat",
        )


def template_conflicts(template: str, field: str, key: str, field_key: str) -> Iterator[Conflict]:
    """Checks that a template has the placeholder for the problem and no other brace."""
    placeholder = "{" + field + "}"
    rest = template.replace(placeholder, "").replace("{question}", "")
    if rest == template or "{" in rest.replace("{{", "") or "}" in rest.replace("}}", ""):
        yield Conflict(
            keys=(key, f"{key.rpartition('.')[0]}.{field_key}".lstrip(".")),
            text=f"={template!r} must hold {placeholder} and no other brace; write {{{{ and }}}} for braces",
        )


class RepairTask(_EpisodesTask):
    """Repair a program that printed False by running others: `[python:(x:=83*2)%7==3 and x]`, a line feed, `{False}`,
    the call `[python:(x:=83*4)%7==3 and x]`, its result, `332`."""

    SIZE = ""

    kind: Literal["repair"]

    @property
    def num_tokens(self) -> tuple[int, int]:
        return len("[python:(x:=83*2)%7==3 and x]\n{False\n}"), len("[python:(x:=83*4)%7==3 and x]")


class RoadsTask(_EpisodesTask):
    """Two look-ups in a corpus: `kav>>`, the call `[find:kav]`, its result, `[find:dom]`, its result, `fil`."""

    SIZE = ""

    kind: Literal["roads"]

    @property
    def num_tokens(self) -> tuple[int, int]:
        return 5, len("[find:kav]")


class GridTask(_EpisodesTask):
    """Cross a grid move by move: `d4<a2=`, to d4 from a2, then l, r, u or d (agent: rlinf.tasks.games:play_grid)."""

    SIZE = ""

    kind: Literal["grid"]

    @property
    def num_tokens(self) -> tuple[int, int]:
        return 6, 1


class TeamTask(_EpisodesTask):
    """Two players must agree on signs: one sees a secret, the other guesses it (agent: rlinf.tasks.games:play_team)."""

    SIZE = ""

    kind: Literal["team"]

    @property
    def num_tokens(self) -> tuple[int, int]:
        return 4, 2


DrawnTaskConfig = CountShapesTask | GuiClickTask | ChartReadTask
GeneratedTaskConfig = (
    SortTask | AddTask | CalculateTask | RepairTask | RoadsTask | GridTask | TeamTask | DrawnTaskConfig
)
TaskConfig = Annotated[GeneratedTaskConfig | FilesTask, Field(discriminator="kind")]
