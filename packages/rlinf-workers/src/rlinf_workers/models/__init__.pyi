from .frame_sampling import FrameSampling as FrameSampling, sampled_frames as sampled_frames
from .language_model import (
    ModelSettings as ModelSettings,
    end_tokens as end_tokens,
    load_tokenizer as load_tokenizer,
)
from .lora import (
    ALL_LINEAR as ALL_LINEAR,
    LoraSettings as LoraSettings,
    base_of as base_of,
    check_base as check_base,
    find_targets as find_targets,
    policy_targets as policy_targets,
    write_merged as write_merged,
)
from .picture_files import (
    PictureError as PictureError,
    decoded_picture as decoded_picture,
    fetched_picture as fetched_picture,
    picture_from_base64 as picture_from_base64,
    picture_from_data_url as picture_from_data_url,
    picture_size as picture_size,
)
from .picture_processor import (
    PictureProcessor as PictureProcessor,
    StoredPicture as StoredPicture,
    StoredVideo as StoredVideo,
    reads_pictures as reads_pictures,
)
from .picture_texts import MARKER as MARKER, TILED as TILED, VIDEO_MODELS as VIDEO_MODELS
from .pictures import VISION_LANGUAGE as VISION_LANGUAGE, picture_places as picture_places
from .routers import (
    has_balanced_routers as has_balanced_routers,
    has_routers as has_routers,
)
from .weight_files import index_name as index_name
from .weight_writer import (
    index_of as index_of,
    write_tensors as write_tensors,
)
