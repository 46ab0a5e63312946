"""From traces and what machines have to checked plans."""
