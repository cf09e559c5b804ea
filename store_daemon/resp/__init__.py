"""A door for Redis clients: values of any kind in the node's pool (docs/resp.md)."""
