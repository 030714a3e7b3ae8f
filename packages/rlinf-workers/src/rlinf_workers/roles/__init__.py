"""The workers that come with the package: who they are in a flow, and which engine or model does their work."""
