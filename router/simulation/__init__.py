"""A cluster of engines without engines: discrete events around the router's own decisions."""
