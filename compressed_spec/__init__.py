"""Tree speculative decoding, provably exact, for models whose attention compresses history."""

from compressed_spec.chat import encode_chat
from compressed_spec.generate import GenerationResult, Usage, generate
from compressed_spec.models.deepseek_v4.load import load_model
from compressed_spec.tree import TokenTree

__all__ = ["GenerationResult", "TokenTree", "Usage", "__version__", "encode_chat", "generate", "load_model"]
__version__ = "0.1.0"
