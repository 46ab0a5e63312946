"""Edge mode (Prism): each server has its own requests and experts, and calls other servers for the rest."""
