"""HTTP: the OpenAI-compatible server over a `moetool.runtime` engine, and a client that chats with it."""
