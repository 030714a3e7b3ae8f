"""A success classifier: its verdicts after a round trip through its file, and the file's digest."""

import numpy as np
import pytest
import torch

from rlinf_envs import EnvError
from rlinf_workers.policies import PictureClassifier
from rlinf_workers.policies.success_classifier import load_classifier


def test_a_saved_classifier_sees_the_same_and_another_file_is_refused(tmp_path):
    classifier = PictureClassifier({"image.wrist": (40, 36, 3), "image.front": (36, 36, 1)}, seed=1)
    pictures = {
        name: torch.randint(256, (64, *shape), dtype=torch.uint8, generator=torch.Generator().manual_seed(2))
        for name, shape in classifier.cameras.items()
    }
    with torch.no_grad():
        middle = float(torch.sigmoid(classifier(pictures)).median())
        classifier.raise_threshold(middle)
        expected = (classifier(pictures) > 0).tolist()
    assert 0 < sum(expected) < 64
    saved = classifier.save(tmp_path / "classifier.safetensors")
    sees_success = load_classifier(saved.file, saved.digest)
    rows = [{name: values[row].numpy() for name, values in pictures.items()} for row in range(64)]
    assert [sees_success({**row, "state": np.zeros(1)}) for row in rows] == expected
    with pytest.raises(EnvError, match=r"has the digest .* and the run's has 00"):
        load_classifier(saved.file, "0" * 64)
