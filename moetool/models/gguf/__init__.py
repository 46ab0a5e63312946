"""GGUF files of llama.cpp: header, blocks, tensors, tokenizer."""
