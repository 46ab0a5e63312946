"""A trace as one page: measures, figures, and what they say, behind `moetool report`."""
