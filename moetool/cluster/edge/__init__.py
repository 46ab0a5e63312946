"""Edge mode (Prism): servers with requests and experts of their own, which call one another for the rest."""
