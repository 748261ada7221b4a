"""`make demo`: real traffic on a serving engine while a second model generates on the same device."""
