"""The files of other programs, one format a file; the file's name is the format's."""
