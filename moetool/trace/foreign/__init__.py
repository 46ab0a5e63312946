"""Import and export of the files of other programs: detection, facts about the model, shared readers."""
