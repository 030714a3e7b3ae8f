"""What tests of flows, backends, engines, policies, launchers and links have in common."""
