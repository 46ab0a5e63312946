"""The ground floor: types, errors, settings, plugins, files, facts about the machine, terminal output."""
