"""One module per attention backend; imported only when the factory chose it."""
