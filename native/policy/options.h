#pragma once

// Options of a built-in policy or admission: what stands in parentheses after its name, "key=value, key=value".

#include <map>
#include <string>

class policy_options {
  public:
    explicit policy_options(const char * text);

    // The value of a key, or `fallback` if it is not given. One that is not a number, or out of range, is an error.
    double      number(const char * key, double fallback, double lowest, double highest);
    long        integer(const char * key, long fallback, long lowest, long highest);
    std::string text(const char * key);

    void fail(const std::string & message);

    // "" if all is well, else what is wrong first; keys that nobody asked for are wrong, too.
    std::string error() const;

  private:
    std::map<std::string, std::string> values; // not asked for yet
    std::string                        known;  // keys that were asked for
    std::string                        first_error;
};
