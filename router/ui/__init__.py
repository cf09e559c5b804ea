"""The page at /ui: what the router knows and does, for a person who keeps it open."""
