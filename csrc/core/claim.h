// What may be done once a process, though a library may be in it more than once: copies under other paths share this
// one core library, by its name.
#pragma once

namespace pyquant {

// True the first time that somebody asks for a name, false ever after.
bool claim(const char* name);

}  // namespace pyquant
