"""Files of a checkpoint: hub, safetensors, GGUF, and where each tensor lies."""
