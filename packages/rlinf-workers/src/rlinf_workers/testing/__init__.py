"""What tests of flows, backends, engines, policies, launchers and weight syncs have in common."""
