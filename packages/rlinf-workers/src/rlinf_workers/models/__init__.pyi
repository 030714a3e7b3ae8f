from .language_model import (
    ModelSettings as ModelSettings,
)
from .language_model import (
    end_tokens as end_tokens,
)
from .language_model import (
    load_tokenizer as load_tokenizer,
)
from .lora import (
    ALL_LINEAR as ALL_LINEAR,
)
from .lora import (
    LoraSettings as LoraSettings,
)
from .lora import (
    base_of as base_of,
)
from .lora import (
    check_base as check_base,
)
from .lora import (
    find_targets as find_targets,
)
from .lora import (
    policy_targets as policy_targets,
)
from .lora import (
    write_merged as write_merged,
)
from .routers import has_balanced_routers as has_balanced_routers
from .weight_files import index_name as index_name
from .weight_writer import (
    index_of as index_of,
)
from .weight_writer import (
    write_tensors as write_tensors,
)
