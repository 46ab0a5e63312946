"""What a machine takes for experts, attention and loads, and what a program of them takes."""
