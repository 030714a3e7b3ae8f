"""What all kinds of environments share: the protocol, batches of rows, simulators in processes of their own."""
