"""Sa2VA out of transformers' native modules, in the original checkpoint layout."""

from .configuration_sa2va import Sa2VAConfig
from .modeling_sa2va import Sa2VAModel
from .processing_sa2va import Sa2VAProcessor
from .templates import PROMPT_TEMPLATE, video_lisa_encode_fn

__all__ = ["Sa2VAConfig", "Sa2VAModel", "Sa2VAProcessor", "PROMPT_TEMPLATE", "video_lisa_encode_fn"]
