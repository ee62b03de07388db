"""What takes minutes: faults by the thousand. ``make soak`` runs everything."""
