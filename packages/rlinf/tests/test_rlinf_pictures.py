"""Pictures and videos of problems: the forms in which rows have them, what is refused, and prompts with them."""

from __future__ import annotations

import base64
import hashlib
import io
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import imageio_ffmpeg
import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoConfig, AutoModelForImageTextToText
from workers_vision_folders import tiny_folder

from rlinf.config.load import load_config
from rlinf.config.overrides import parse_overrides
from rlinf.config.reasoning import ArchitectureConfig, ReasoningConfig, SftWarmUpConfig
from rlinf.config.tasks import DrawnTaskConfig, FilesTask
from rlinf.errors import UserError
from rlinf.jobs.models import refuse_blind_trainer, refuse_videos_of_agents
from rlinf.jobs.reasoning import checks
from rlinf.jobs.reasoning.prompts import WARM_UP_OFFSET, PromptSource
from rlinf.tasks import TaskProblem
from rlinf.tasks.base import digest_of
from rlinf.tasks.drawings import picture_of
from rlinf.tasks.files import FileProblems
from rlinf.tasks.language import load_checkpoint_tokenizer, write_model_folder
from rlinf.tasks.prompts import PromptEncoder, make_encoder
from rlinf.tasks.videos import ProblemVideo
from rlinf_workers.models import PictureProcessor

QWEN_TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] }}{% for p in m.content %}{% if p.type == 'image' %}<|vision_start|>"
    "<|image_pad|><|vision_end|>{% elif p.type == 'video' %}<|vision_start|><|video_pad|><|vision_end|>"
    "{% else %}{{ p.text }}{% endif %}{% endfor %} {% endfor %}"
    "{% if add_generation_prompt %}a{% endif %}"
)


def picture(seed: int = 0, size: tuple[int, int] = (40, 24)) -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def file_of(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


RED, BLUE = (file_of(picture(seed)) for seed in (1, 2))
URL = f"data:image/png;base64,{base64.b64encode(RED).decode()}"


def settings(file: Path, **options: Any) -> FilesTask:
    return FilesTask.model_validate(
        {"kind": "files", "train_files": str(file), "prompt_template": "{question}", "num_held_out": 1, **options}
    )


def read(folder: Path, *rows: Mapping[str, Any], **options: Any) -> list[TaskProblem]:
    """The problems of a file, in its order."""
    folder.mkdir(exist_ok=True)
    (folder / "red.png").write_bytes(RED)
    (folder / "blue.png").write_bytes(BLUE)
    file = folder / "train.jsonl"
    filler = [{"question": f"{number}", "answer": "0"} for number in range(10)]
    file.write_text("".join(json.dumps(row) + "\n" for row in (*rows, *filler)))
    problems = FileProblems(settings(file, **options), seed=0)
    return sorted(problems.all_problems(), key=lambda problem: problem.number)[: len(rows)]


USER = {"role": "user", "content": "a<image>b"}
A, B = {"type": "text", "text": "a"}, {"type": "text", "text": "b"}
OPENAI = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": URL}}, A]}]
BARE = [{"role": "user", "content": [A, {"type": "image"}, B]}]


@pytest.mark.parametrize(
    ("row", "prompt"),
    [
        ({"question": "a<image>b", "images": ["red.png"]}, "a<image>b"),
        ({"question": "ab", "image": "red.png"}, "<image>ab"),
        ({"question": "ab", "image": {"bytes": base64.b64encode(RED).decode(), "path": "any.png"}}, "<image>ab"),
        ({"question": "ab", "image": {"bytes": None, "path": "red.png"}}, "<image>ab"),
        ({"question": "ab", "images": URL}, "<image>ab"),
        ({"prompt": [USER], "images": ["red.png"]}, "a<image>b"),
        ({"messages": BARE, "images": ["red.png"]}, "a<image>b"),
        ({"messages": OPENAI}, "<image>a"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "image": "red.png"}]}]}, "<image>"),
    ],
)
def test_a_row_has_a_picture(tmp_path: Path, row: dict[str, Any], prompt: str) -> None:
    (problem,) = read(tmp_path, {**row, "answer": "1"})
    assert problem.prompt == prompt
    (one,) = problem.pictures
    assert (one.width, one.height, one.digest) == (40, 24, hashlib.sha256(RED).hexdigest())
    np.testing.assert_array_equal(np.asarray(one.decode()), np.asarray(picture(1)))
    assert len(problem.row_json) < 300, "without the bytes of pictures"


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"image": "green.png"}, r"train.jsonl:1: picture 1: .*green.png: No such file or directory"),
        ({"image": "http://example.org/a.png"}, r"picture 1: 'http.*is on the network.*task.fetch_pictures true"),
        ({"image": "data:image/png,abc"}, "data URL of a picture begins like"),
        ({"image": "data:image/png;base64,a*c"}, "is not base64"),
        ({"image": {"bytes": "", "path": None}}, "is empty"),
        ({"image": {"bytes": None, "path": None}}, "an object must have one of bytes"),
        ({"image": [3]}, "must be a path, bytes.*is a int"),
        ({"image": "train.jsonl"}, r"picture 1: \S+/train.jsonl is no picture that Pillow reads\n"),
        ({"question": "<image><image>", "image": "red.png"}, "2 markers <image>, but the row has 1 picture\n"),
        ({"images": {"bytes": base64.b64encode(RED[:-20]).decode()}}, "is damaged"),
    ],
)
def test_a_picture_that_cannot_be_used_is_answered_with_its_row(
    tmp_path: Path, row: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        read(tmp_path, {"question": "a", "answer": "1", **row})


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([{"type": "video", "video": "a.mp4"}], "video 1: .*a.mp4: No such file or directory"),
        ([{"type": "video"}], "of 1 videos in the chat 1 have no path, bytes or URL"),
        ([{"type": "image"}], "of 1 pictures in the chat 1 have no path, bytes or URL"),
        ([{"type": "audio"}], r"train.jsonl:1: field 'messages': turn 1 has parts of type 'audio'"),
    ],
)
def test_parts_of_a_chat_that_cannot_be_used(tmp_path: Path, parts: list[Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        read(tmp_path, {"messages": [{"role": "user", "content": parts}], "answer": "1"})


def test_tables_have_pictures_as_hugging_face_writes_them(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    rows = {
        "problem": [f"{number}" for number in range(11)],
        "images": [[picture(number)] for number in range(11)],
        "answer": ["1"] * 11,
    }
    features = datasets.Features(
        problem=datasets.Value("string"), images=datasets.List(datasets.Image()), answer=datasets.Value("string")
    )
    table = datasets.Dataset.from_dict(rows, features=features)
    table.save_to_disk(tmp_path / "disk")
    table.to_parquet(tmp_path / "rows.parquet")
    for source in ("disk", "rows.parquet"):
        problems = list(FileProblems(settings(tmp_path / source), seed=0).all_problems())
        assert len(problems) == 11
        for problem in problems:
            assert problem.pictures[0].content.startswith(b"\x89PNG")
            np.testing.assert_array_equal(
                np.asarray(problem.pictures[0].decode()), np.asarray(picture(problem.number - 1))
            )


def test_pictures_are_turned_upright_and_have_8_bits(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    (tmp_path / "phone.jpg").write_bytes(file_of(picture(3), "JPEG", exif=exif))
    deep = (np.arange(40 * 24, dtype=np.uint16) * 60).reshape(24, 40)
    (tmp_path / "deep.png").write_bytes(file_of(Image.fromarray(deep)))
    phone, grey = read(
        tmp_path,
        {"question": "a", "answer": "1", "image": "phone.jpg"},
        {"question": "b", "answer": "1", "image": "deep.png"},
    )
    assert (phone.pictures[0].width, phone.pictures[0].height) == phone.pictures[0].decode().size == (24, 40)
    np.testing.assert_array_equal(np.asarray(grey.pictures[0].decode()), deep >> 8)


def test_what_distinguishes_problems_covers_their_pictures(tmp_path: Path) -> None:
    rows = [{"question": "a", "answer": "1", "image": name} for name in ("red.png", "blue.png", "red.png")]
    red, blue, again = read(tmp_path, *rows)
    assert red.identity == again.identity != blue.identity
    assert red.fingerprint != blue.fingerprint
    (unequal,) = read(tmp_path / "more", rows[0])
    (tmp_path / "more" / "red.png").write_bytes(BLUE)
    with pytest.raises(UserError, match=r"train.jsonl:1: the picture .*red.png is not the one"):
        unequal.pictures[0].decode()


# -- prompts -------------------------------------------------------------------------------------------------------


def encoder_of(folder: Path, task: FilesTask, template: str | None = None) -> tuple[PromptEncoder, PictureProcessor]:
    tokenizer = load_checkpoint_tokenizer(folder)
    tokenizer.chat_template = template
    return make_encoder(task, tokenizer, folder, "task."), PictureProcessor(str(folder), tokenizer)


@pytest.mark.parametrize("template", [None, QWEN_TEMPLATE], ids=["plain", "chat"])
def test_a_prompt_has_its_pictures_where_the_text_says(tmp_path: Path, template: str | None) -> None:
    rows = [
        {"question": "1<image>2<image>=", "answer": "1", "images": ["red.png", "blue.png"]},
        {"question": "<image> 3", "answer": "1"},
    ]
    problem, text_alone = read(tmp_path, *rows)
    folder = Path(tiny_folder(tmp_path / "model", "qwen2_5_vl"))
    encoder, processor = encoder_of(folder, settings(tmp_path / "train.jsonl"), template)
    one = processor.picture_text
    text = f"1{one}2{one}="
    assert encoder.text(problem) == (text if template is None else f"u{text} a")
    expected, pictures = processor.encode(encoder.text(problem), problem.pictures)
    prompt = encoder.prompt(0, problem, max_tokens=None, sends_row=True, sends_pictures=True)
    assert prompt.token_ids.tolist() == expected
    assert [one.numpy().tobytes() for one in prompt.picture_files] == [RED, BLUE]
    assert pictures is not None and prompt.pictures is not None and prompt.pictures.digest == pictures.digest
    assert encoder.num_tokens([problem, text_alone]) == [len(expected), len(encoder.encode(text_alone.content))]
    assert encoder.prompt(1, text_alone, max_tokens=None, sends_row=True).pictures is None


def test_long_prompts_with_pictures_are_dropped_and_never_cut(tmp_path: Path) -> None:
    rows = [{"question": "<image>=" + "1" * number, "answer": "1", "image": "red.png"} for number in range(3)]
    (problem, *_) = read(tmp_path, *rows)
    folder, file = Path(tiny_folder(tmp_path / "model", "qwen2_5_vl")), tmp_path / "train.jsonl"
    encoder, _ = encoder_of(folder, settings(file))
    (num_tokens,) = encoder.num_tokens([problem])
    dropping = FileProblems(settings(file, long_prompts="drop"), seed=0)
    dropping.fit(encoder, num_tokens + 1)
    assert sum(bool(one.pictures) for one in dropping.all_problems()) == 2
    cutting = FileProblems(settings(file, long_prompts="keep_end"), seed=0)
    with pytest.raises(UserError, match=r"train.jsonl:\d has pictures, which task.long_prompts=keep_end would cut"):
        cutting.fit(encoder, num_tokens + 1)
    with pytest.raises(UserError, match="pictures are not cut"):
        encoder.prompt(0, problem, max_tokens=num_tokens - 1, sends_row=False)


def test_limits_in_pixels_belong_to_models_that_have_them(tmp_path: Path) -> None:
    (problem,) = read(tmp_path, {"question": "1", "answer": "1", "image": "red.png"})
    folder = Path(tiny_folder(tmp_path / "model", "qwen2_5_vl"))
    encoder, _ = encoder_of(folder, settings(tmp_path / "train.jsonl", max_pixels=512))
    assert encoder.num_tokens([problem]) == [2 + 1 + 1]
    encoder, _ = encoder_of(folder, settings(tmp_path / "train.jsonl"))
    assert encoder.num_tokens([problem]) == [2 + 4 + 1]


def test_models_that_read_text_alone_refuse_pictures(tmp_path: Path) -> None:
    row = {"question": "1", "answer": "1", "image": "red.png"}
    (problem,) = read(tmp_path, row)
    tokenizer = load_checkpoint_tokenizer(Path(tiny_folder(tmp_path / "model", "qwen2_5_vl")))
    with pytest.raises(UserError, match=r"train.jsonl:1 has pictures or videos, and the model reads text alone"):
        PromptEncoder(tokenizer).num_tokens([problem])
    (ignoring,) = read(tmp_path, row, columns={"images": False})
    assert PromptEncoder(tokenizer).num_tokens([ignoring]) == [1]
    refused = (
        "task.min_pixels and task.max_pixels cannot be used: .*or set task.min_pixels and task.max_pixels to null$"
    )
    with pytest.raises(UserError, match="(?s)" + refused):
        make_encoder(settings(tmp_path / "train.jsonl", min_pixels=9, max_pixels=99), tokenizer, tmp_path, "task.")


def test_a_placeholder_in_the_text_of_a_problem_is_refused(tmp_path: Path) -> None:
    (problem,) = read(tmp_path, {"question": "1<|image_pad|>", "answer": "1"})
    folder = Path(tiny_folder(tmp_path / "model", "qwen2_5_vl"))
    encoder, _ = encoder_of(folder, settings(tmp_path / "train.jsonl"))
    with pytest.raises(
        UserError, match=r"train.jsonl:1: as the model reads it, the text has the placeholder '<.image_pad.>' 1 times"
    ):
        encoder.num_tokens([problem])


# -- videos -----------------------------------------------------------------------------------------------------------


NUM_FRAMES, FPS, SIZE = 21, 10.0, (32, 16)
TAKEN = (0, 7, 13, 20)
"""Of 2.1 seconds, two frames a second."""


def frames() -> np.ndarray:
    """[frames, rows, columns, 3] uint8"""
    shape = (NUM_FRAMES, SIZE[1], SIZE[0], 3)
    return np.random.default_rng(5).integers(0, 256, shape, dtype=np.uint8)


@pytest.fixture(scope="module")
def film(tmp_path_factory: Any) -> bytes:
    """A file whose frames are compressed without loss."""
    file = tmp_path_factory.mktemp("film") / "film.mov"
    writer = imageio_ffmpeg.write_frames(
        str(file), SIZE, fps=FPS, codec="png", pix_fmt_out="rgb24", macro_block_size=1, quality=None
    )
    writer.send(None)
    for frame in frames():
        writer.send(np.ascontiguousarray(frame))
    writer.close()
    return file.read_bytes()


def read_rows(folder: Path, film: bytes, *rows: Mapping[str, Any], **options: Any) -> list[TaskProblem]:
    folder.mkdir(exist_ok=True)
    (folder / "film.mov").write_bytes(film)
    return read(folder, *rows, **options)


PART = {"type": "video", "video": "film.mov"}


@pytest.mark.parametrize(
    ("row", "prompt"),
    [
        ({"question": "a<video>b", "videos": ["film.mov"]}, "a<video>b"),
        ({"question": "ab", "video": "film.mov"}, "<video>ab"),
        ({"question": "ab", "video": {"bytes": "FILM", "path": "any.mov"}}, "<video>ab"),
        ({"messages": [{"role": "user", "content": [PART, {"type": "text", "text": "a"}]}]}, "<video>a"),
    ],
)
def test_a_row_has_a_video_whose_frames_are_taken_in_time(
    tmp_path: Path, film: bytes, row: dict[str, Any], prompt: str
) -> None:
    if isinstance(row.get("video"), dict):
        row = {**row, "video": {"bytes": base64.b64encode(film).decode()}}
    (problem,) = read_rows(tmp_path, film, {**row, "answer": "1"})
    assert problem.prompt == prompt
    (video,) = problem.pictures
    assert isinstance(video, ProblemVideo) and (video.width, video.height) == SIZE
    assert (video.sampling.indices, video.sampling.num_frames, video.sampling.fps) == (TAKEN, NUM_FRAMES, FPS)
    np.testing.assert_array_equal(np.stack([np.asarray(one) for one in video.decode_frames()]), frames()[list(TAKEN)])
    assert [np.asarray(Image.open(io.BytesIO(file))).shape for file in video.files] == [(16, 32, 3)] * 4
    assert len(problem.row_json) < 300, "without the bytes of videos"


def test_a_list_of_frames_is_a_video_with_the_time_of_the_settings(tmp_path: Path) -> None:
    row = {"question": "a", "answer": "1", "videos": [["red.png", "blue.png", "red.png"]]}
    (problem,) = read(tmp_path, row, video_fps=4.0)
    (video,) = problem.pictures
    assert isinstance(video, ProblemVideo)
    assert (video.sampling.indices, video.sampling.fps, video.files[0]) == ((0, 1, 2), 4.0, RED)
    np.testing.assert_array_equal(np.asarray(video.decode_frames()[1]), np.asarray(picture(2)))
    (fewer,) = read(tmp_path, row, max_frames=2)
    assert fewer.pictures[0].digest != video.digest and fewer.identity != problem.identity


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"videos": ["film.mov", "blue.txt"]}, "video 2: .*blue.txt: No such file"),
        ({"videos": ["red.png", "blue.png"]}, r"video 1: \S+/red.png has 1 frame, .*is a list in the list of videos"),
        (
            {"video": "train.jsonl"},
            r"train.jsonl:1: video 1: \S+/train.jsonl is no video that ffmpeg reads: .*list in the list",
        ),
        (
            {"videos": [["red.png", "train.jsonl"]]},
            r"video 1: frame 2: \S+/train.jsonl is no picture that Pillow reads",
        ),
        ({"videos": [["red.png", "small.png"]]}, "video 1: has frames of 2 x 2 and 40 x 24 pixels; all must have one"),
        ({"videos": [[]]}, "video 1: has no frames"),
        ({"question": "<video><video>", "video": "film.mov"}, "2 markers <video>, but the row has 1 video\n"),
        (
            {"question": "<video>", "videos": ["a.png", "b.png"]},
            "1 marker <video>, but the row has 2 videos; the frames",
        ),
    ],
)
def test_a_video_that_cannot_be_used_is_answered_with_its_row(
    tmp_path: Path, film: bytes, row: dict[str, Any], message: str
) -> None:
    picture(0, (2, 2)).save(tmp_path / "small.png")
    with pytest.raises(UserError, match=message):
        read_rows(tmp_path, film, {"question": "a", "answer": "1", **row})


def test_a_film_that_is_cut_or_another_one_now_ends_the_run(tmp_path: Path, film: bytes) -> None:
    row = {"question": "a", "answer": "1", "video": "film.mov"}
    (problem,) = read_rows(tmp_path, film, row)
    (tmp_path / "film.mov").write_bytes(film[::-1])
    with pytest.raises(UserError, match=r"train.jsonl:1: the video .*film.mov is not the one that was there"):
        problem.pictures[0].files  # noqa: B018


@pytest.mark.parametrize("template", [None, QWEN_TEMPLATE], ids=["plain", "chat"])
def test_a_prompt_has_pictures_and_videos_where_the_text_says(
    tmp_path: Path, film: bytes, template: str | None
) -> None:
    row = {"question": "1<video>2<image>=", "answer": "1", "images": ["red.png"], "videos": ["film.mov"]}
    problem, text_alone = read_rows(tmp_path, film, row, {"question": "<video> 3", "answer": "1"})
    assert [type(one).__name__ for one in problem.pictures] == ["ProblemVideo", "ProblemPicture"]
    folder = Path(tiny_folder(tmp_path / "model", "qwen3_vl"))
    encoder, processor = encoder_of(folder, settings(tmp_path / "train.jsonl"), template)
    text = f"1{processor.video_text}2{processor.picture_text}="
    assert encoder.text(problem) == (text if template is None else f"u{text} a")
    expected, pictures = processor.encode(encoder.text(problem), problem.pictures)
    prompt = encoder.prompt(0, problem, max_tokens=None, sends_row=True, sends_pictures=True)
    assert prompt.token_ids.tolist() == expected and len(prompt.picture_files) == len(TAKEN) + 1
    assert pictures is not None and prompt.pictures is not None and prompt.pictures.digest == pictures.digest
    assert encoder.num_tokens([problem, text_alone]) == [len(expected), len(encoder.encode(text_alone.content))]
    refuse_videos_of_agents([text_alone])
    with pytest.raises(UserError, match=r"train.jsonl:1 has a video, which agents cannot read"):
        refuse_videos_of_agents([problem, text_alone])


def test_models_whose_videos_are_not_read_refuse_them_by_name(tmp_path: Path, film: bytes) -> None:
    pytest.importorskip("num2words")
    (problem,) = read_rows(tmp_path, film, {"question": "1", "answer": "1", "video": "film.mov"})
    folder = Path(tiny_folder(tmp_path / "model", "smolvlm"))
    encoder, _ = encoder_of(folder, settings(tmp_path / "train.jsonl"))
    with pytest.raises(UserError, match=r"videos are not read for model_type='smolvlm'.*give some frames as pictures$"):
        encoder.num_tokens([problem])


# -- generated tasks -----------------------------------------------------------------------------------------------


def drawn(kind: str, *flags: str) -> PromptSource:
    """The prompts of a run with a tiny new model."""
    overrides = [
        f"--task.kind={kind}",
        "--task.num_held_out=50",
        "--rollout.max_new_tokens=11",
        "--rollout.max_prompt_tokens=32",
        *flags,
    ]
    return PromptSource(cast(ReasoningConfig, load_config("count-shapes-grpo", parse_overrides(overrides))))


DRAWN = {"count-shapes": "33560c62a850fc33", "gui-click": "dd898514541dd575", "chart-read": "c64f4a8ceef9513f"}
"""Kind -> beginning of the digest of its first problems."""


@pytest.mark.parametrize("kind", DRAWN)
def test_drawn_problems_are_the_same_on_every_machine(kind: str) -> None:
    source = drawn(kind)
    problems = [source.task.train_problem(index) for index in range(200)]
    assert digest_of(problems)[:16] == DRAWN[kind]
    held_out = source.held_out[""]
    assert not {one.identity for one in held_out} & {one.identity for one in problems}
    (length,) = {len(prompt.token_ids) for prompt in source.training(0, 20)}
    task, architecture = source._config.task, source._config.model.architecture
    assert isinstance(task, DrawnTaskConfig) and architecture is not None and architecture.vision_tower is not None
    assert length == task.num_tokens[0] + architecture.vision_tower.num_tokens(*task.picture_size)
    assert max(len(one.answer) for one in problems) == task.num_tokens[1]
    assert not source.encoder.num_with_unknown(replace(one, prompt=one.answer, pictures=()) for one in problems)


def test_shuffled_pictures_are_those_of_other_problems() -> None:
    own, shuffled = drawn("count-shapes").task, drawn("count-shapes", "--task.shuffle_pictures=true").task
    pairs = [(own.train_problem(index), shuffled.train_problem(index)) for index in range(50)]
    assert all(one.prompt == other.prompt and one.answer == other.answer for one, other in pairs)
    assert all(one.pictures != other.pictures for one, other in pairs)


def test_examples_of_the_warm_up_have_the_pictures_of_their_prompts() -> None:
    source = drawn("count-shapes")
    settings = SftWarmUpConfig(batch_size=6)
    for batch in source.examples(settings, step=0):
        rows = range(batch.shard, 6, source._config.actor.resolved_shards)
        for place, index in enumerate(rows):
            problem = source.task.train_problem(WARM_UP_OFFSET + index)
            (prompt,) = source._prompts([problem])
            pictures = batch.pictures[place]
            assert pictures is not None and prompt.pictures is not None and pictures.digest == prompt.pictures.digest
            assert batch.token_ids[place, : len(prompt.token_ids)].tolist() == prompt.token_ids.tolist()
            assert batch.loss_mask[place].sum() == 2, "the digit and the end"


def test_a_new_models_folder_is_one_that_transformers_reads(tmp_path: Path) -> None:
    architecture = ArchitectureConfig(family="qwen2_5_vl", max_positions=128, initializer_range=0.1)
    write_model_folder(tmp_path, architecture, "0123=", "float32")
    processor = PictureProcessor(str(tmp_path), load_checkpoint_tokenizer(tmp_path))
    whole = picture_of(np.zeros((48, 64, 3), np.uint8))
    token_ids, pictures = processor.encode(f"{processor.picture_text}0=", [whole])
    assert pictures is not None and len(token_ids) == 2 + 3 * 4 + 2
    model: Any = AutoModelForImageTextToText.from_config(AutoConfig.from_pretrained(tmp_path))
    ids = torch.tensor([token_ids])
    kinds = (ids == processor.placeholder_id).int()
    logits = model(ids, mm_token_type_ids=kinds, **pictures.pictures[0].arguments).logits
    assert logits.shape == (1, len(token_ids), 3 + 5 + 4)
    matrices = {name: one.std().item() for name, one in model.named_parameters() if one.dim() > 1}
    assert all(0.09 < std < 0.11 for std in matrices.values()), f"drawn with the config's initializer_range: {matrices}"


def test_a_model_of_text_alone_is_refused_for_tasks_with_pictures() -> None:
    with pytest.raises(UserError, match=r"task.kind=count-shapes has pictures, and model.architecture.family=qwen2"):
        drawn("count-shapes", "--model.architecture.family=qwen2", "--model.architecture.vision=null")
    with pytest.raises(UserError, match=r"rollout.max_prompt_tokens=8 is too short.*has 17 tokens"):
        drawn("count-shapes", "--rollout.max_prompt_tokens=8")


def agent_that_sees(*flags: str, kind: str = "qwen2_5_vl") -> Any:
    overrides = ["--rollout.agent.max_context_tokens=48", "--rollout.engine_options.refill=true", *flags]
    config = load_config("count-shapes-grpo", parse_overrides(overrides))
    return SimpleNamespace(config=config, model_config={"model_type": kind})


def test_what_agents_that_see_cannot_have_is_refused(tmp_path: Path) -> None:
    checks.pictures(agent_that_sees())
    with pytest.raises(
        UserError, match=r"rollout.engine=huggingface does not support.*leave engine_options.keep_turns out"
    ):
        checks.pictures(agent_that_sees("--rollout.engine_options.keep_turns=true", kind="smolvlm"))
    flags = [
        "--mode=collocated",
        "--actor.backend_options.sequence_parallel=2",
        "--actor.max_tokens_per_micro_batch=99",
    ]
    config: Any = load_config("count-shapes-grpo", parse_overrides(flags))
    shared = config.actor
    refuse_blind_trainer(shared, "qwen2_5_vl")
    with pytest.raises(UserError, match=r"actor.backend_options.sequence_parallel: does not support pictures"):
        refuse_blind_trainer(shared, "smolvlm")
    tiny_folder(tmp_path, "qwen2_5_vl")
    judge = f"--rollout.agent.agents={{solver: {{}}, judge: {{trains: false, path: {tmp_path}}}}}"
    with pytest.raises(UserError, match=r"rollout.agent.agents.judge.path: pictures are processed for one model"):
        checks.pictures(agent_that_sees("--rollout.agent.run=my:play", judge))
