from .base import (
    Needs as Needs,
    Policy as Policy,
    PolicyError as PolicyError,
    PolicySettings as PolicySettings,
    PolicyStep as PolicyStep,
    make_policy as make_policy,
    outline_policy as outline_policy,
)
from .heads.choose import head_for as head_for
from .picture_encoder import encoded_cameras as encoded_cameras
from .soft import (
    CriticSettings as CriticSettings,
    LearnedSpaces as LearnedSpaces,
    SoftCritics as SoftCritics,
    SoftPolicy as SoftPolicy,
)
from .spec import FOLDER_OPTIONS as FOLDER_OPTIONS, ActingCost as ActingCost, PolicySpec as PolicySpec
from .success_classifier import CLASSIFIER_LOADER as CLASSIFIER_LOADER, PictureClassifier as PictureClassifier
