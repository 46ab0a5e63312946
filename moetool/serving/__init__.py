"""HTTP: the OpenAI-compatible server of a `moetool.runtime` engine, and a chat client."""
