"""The models that clients name, and the objects that the gateway builds from their cards."""
